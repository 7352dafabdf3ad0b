"""Loading a language model and its tokenizer from local files, with errors that say what to do."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hal.errors import FileError, UnsupportedError
from hal.port.transformers import require_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["load"]

_GGUF_MAGIC = b"GGUF"


def load(path: Path, dtype: torch.dtype, device: str = "cpu") -> tuple[PreTrainedModel, Any]:
    """A causal language model in eval mode, and its tokenizer, from a GGUF file or a Hugging Face directory.

    Nothing is downloaded. A GGUF's quantised weights are expanded to `dtype`. Raises FileError if the path holds no
    model that transformers can read, UnsupportedError if a package for it is missing.
    """
    require_transformers()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, gguf = _located(path)
    where: dict[str, Any] = {"local_files_only": True} | ({"gguf_file": gguf} if gguf else {})
    if gguf:
        _require("gguf")
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, **where)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **where)
    except ImportError as error:
        raise UnsupportedError(f"{str(path)!r} needs a package that is missing: {error}") from error
    except Exception as error:  # transformers, gguf, tokenizers and safetensors each raise kinds of their own
        raise FileError(
            f"{str(path)!r} cannot be read as a model: {type(error).__name__}: {_first_line(error)}; give a GGUF file, "
            "or a directory with config.json, safetensors weights and a tokenizer"
        ) from error
    return model.to(device).eval(), tokenizer


def _located(path: Path) -> tuple[Path, str | None]:
    """The folder, and the name of a GGUF file in it if that is the model."""
    if path.is_file():
        try:
            with path.open("rb") as file:
                magic = file.read(len(_GGUF_MAGIC))
        except OSError as error:
            raise FileError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
        if magic != _GGUF_MAGIC:
            raise FileError(
                f"{str(path)!r} is not a GGUF file (it begins with {magic!r}, not {_GGUF_MAGIC!r}); "
                "for safetensors weights give their directory"
            )
        return path.parent, path.name
    if not path.is_dir():
        raise FileError(
            f"{str(path)!r} does not exist; give a GGUF file or a Hugging Face directory on this machine "
            "(nothing is downloaded)"
        )
    if (path / "config.json").is_file():
        return path, None
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return path, found[0].name
    what = f"{len(found)} GGUF files: name one of them" if found else "neither config.json nor a GGUF file"
    raise FileError(f"the directory {str(path)!r} has {what}")


def _require(package: str) -> None:
    try:
        __import__(package)
    except ImportError as error:
        raise UnsupportedError(
            f"reading a GGUF file needs the package {package} ({error}); pip install 'torch-hal[transformers]'"
        ) from error


@contextlib.contextmanager
def _quiet() -> Any:
    """No progress bars where nobody watches them."""
    if sys.stderr.isatty():
        yield
        return
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
