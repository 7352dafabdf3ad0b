"""Which operators of CANN do the work of each implementation on each chip, and the rules that they come with.

Data about the adapter, for documentation and tests; nothing here runs when an operator is called, and nothing needs
torch_npu. Named are the operators that compute, not the copies and masks around them. Which version of an operator a
chip gets is torch_npu's choice, by chip and CANN: recorded from torch_npu 2.13.0 with a simulated CANN 8.5.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from hal.backends.ascend.chips import A2, A3, A5, P310
from hal.backends.ascend.implementations import IMPLEMENTATIONS
from hal.backends.ascend.simulator import constraints
from hal.backends.ascend.simulator.constraints import Constraint
from hal.capability import Implementation

__all__ = ["CHIPS", "ROUTES", "Step", "chips", "family", "implementations", "rules"]

# Architectures as descriptors name them, with the name people use, and what the simulator has of each.
CHIPS: Mapping[str, tuple[str, frozenset[str]]] = {
    A2: ("910B", constraints.A2),
    A3: ("A3", constraints.A3),
    A5: ("950", constraints.A5),
    P310: ("310P", constraints.P310),
}


@dataclass(frozen=True)
class Step:
    """A function that an implementation calls, and the operator of CANN behind it.

    call: of torch_npu (`npu_*`) or of ATen. role: forward, training (forward where a gradient is wanted, if that is
    another function) or gradient. elsewhere: the operator on architectures where it is another one.
    """

    call: str
    aclnn: str
    role: Literal["forward", "training", "gradient"] = "forward"
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    def on(self, architecture: str) -> str:
        return self.elsewhere.get(architecture, self.aclnn)


_RMS = Step("npu_rms_norm", "aclnnRmsNorm")
_RMS_GRAD = Step("npu_rms_norm_backward", "aclnnRmsNormGrad", "gradient")
_ADD_RMS = Step("npu_add_rms_norm", "aclnnAddRmsNorm")
_LAYER = Step("layer_norm", "aclnnLayerNorm")
_LAYER_GRAD = Step("native_layer_norm_backward", "aclnnLayerNormBackward", "gradient")
_GEGLU = Step("npu_geglu", "aclnnGeGluV3")
_SOFTMAX = Step("softmax", "aclnnSoftmax")
_PRODUCTS = (Step("matmul", "aclnnMatmul"), Step("addmm", "aclnnAddmm"))
_INFER = Step(
    "npu_fused_infer_attention_score",
    "aclnnFusedInferAttentionScoreV3",
    elsewhere={A5: "aclnnFusedInferAttentionScoreV5"},
)
_INCRE = Step("npu_incre_flash_attention", "aclnnIncreFlashAttentionV4")
_FLASH = Step("npu_fusion_attention", "aclnnFlashAttentionScore", elsewhere={A5: "aclnnFlashAttentionScoreV4"})
_FLASH_TRAIN = replace(_FLASH, role="training")
_FLASH_GRAD = Step(
    "npu_fusion_attention_grad",
    "aclnnFlashAttentionScoreGrad",
    "gradient",
    {A5: "aclnnFlashAttentionScoreGradV4"},
)
_PACKED = Step("npu_fusion_attention", "aclnnFlashAttentionVarLenScoreV4", elsewhere={A5: "aclnnFlashAttentionScoreV4"})
_PACKED_GRAD = Step(
    "npu_fusion_attention_grad",
    "aclnnFlashAttentionUnpaddingScoreGradV4",
    "gradient",
    {A5: "aclnnFlashAttentionScoreGradV4"},
)
_ROTARY = Step("npu_rotary_mul", "aclnnRotaryPositionEmbeddingV2")
_GATHER = Step("npu_gather_pa_kv_cache", "aclnnGatherPaKvCache")

# By operator and implementation: each native one but Triton's, which call no operator of CANN.
ROUTES: Mapping[tuple[str, str], tuple[Step, ...]] = {
    ("rms_norm", "aclnn"): (_RMS, _RMS_GRAD),
    ("rms_norm", "aclnn_310p"): (_RMS,),
    ("add_rms_norm", "aclnn"): (_RMS, _ADD_RMS, _RMS_GRAD),
    ("add_rms_norm", "aclnn_310p"): (_RMS, _ADD_RMS),
    ("layer_norm", "aclnn"): (_LAYER, _LAYER_GRAD),
    ("layer_norm", "aclnn_310p"): (_LAYER,),
    ("linear", "aclnn"): (*_PRODUCTS, Step("matmul", "aclnnMatmul", "gradient")),
    ("linear", "aclnn_310p"): _PRODUCTS,
    ("silu_and_mul", "aclnn"): (
        Step("npu_swiglu", "aclnnSwiGlu"),
        Step("npu_swiglu_backward", "aclnnSwiGluGrad", "gradient"),
    ),
    ("gelu_and_mul", "aclnn"): (_GEGLU, Step("npu_geglu_grad", "aclnnGeGluV3Backward", "gradient")),
    ("gelu_and_mul", "aclnn_310p"): (_GEGLU,),
    ("softmax", "aclnn"): (_SOFTMAX, Step("_softmax_backward_data", "aclnnSoftmaxBackward", "gradient")),
    ("softmax", "aclnn_310p"): (_SOFTMAX,),
    ("rotary_embedding", "aclnn"): (_ROTARY, Step("npu_rotary_mul", _ROTARY.aclnn, "gradient")),
    ("attention", "fused_infer"): (_INFER, _FLASH_TRAIN, _FLASH_GRAD),
    ("attention", "flash"): (_FLASH, _FLASH_GRAD),
    ("attention", "flash_310p"): (Step("npu_prompt_flash_attention", "aclnnPromptFlashAttentionV3"), _INCRE),
    ("attention_varlen", "flash"): (_PACKED, _PACKED_GRAD),
    ("paged_attention", "fused_infer"): (_INFER,),
    ("paged_attention", "incre_flash_310p"): (_INCRE,),
    ("write_kv_cache", "aclnn"): (
        Step("npu_scatter_pa_kv_cache", "aclnnScatterPaKvCache"),
        Step("index_put_", "aclnnIndexPutImpl"),
    ),
    ("write_kv_cache", "aclnn_310p"): (Step("index_put_", "aclnnIndexPutImpl"),),
    ("gather_kv_cache", "aclnn"): (_GATHER,),
    ("gather_kv_cache", "aclnn_950"): (_GATHER,),
    ("cross_entropy", "aclnn"): (Step("npu_cross_entropy_loss", "aclnnCrossEntropyLoss"),),
}


def implementations(op: str) -> list[Implementation]:
    """An operator's implementations, preferred ones first."""
    found = [implementation for implementation in IMPLEMENTATIONS if implementation.op == op]
    return sorted(found, key=lambda i: (i.kind != "native", -i.priority))


def chips(implementation: Implementation) -> list[str]:
    """The architectures that an implementation is for, in the order of CHIPS."""
    wanted = implementation.supports.architectures
    return [architecture for architecture in CHIPS if wanted is None or architecture in wanted]


def family(aclnn: str) -> str:
    """An operator's name without its version: aclnnFusedInferAttentionScoreV3 is of aclnnFusedInferAttentionScore."""
    name, _, version = aclnn.rpartition("V")
    return name if name and version.isdecimal() else aclnn


def rules() -> Iterator[tuple[str, list[Constraint]]]:
    """By the names without versions, the rules of the operators that ROUTES names on any chip."""
    named = {step.on(chip) for steps in ROUTES.values() for step in steps for chip in CHIPS}
    rows = constraints.load()
    for name in sorted({family(aclnn) for aclnn in named}):
        used = {aclnn for aclnn in named if family(aclnn) == name}
        found = [row for row in rows if used & set(row.operators)]
        if found:
            yield name, found
