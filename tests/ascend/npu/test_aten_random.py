"""Random numbers on the simulated device: repeatable, and of the distribution asked for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hal import philox
from hal.backends.ascend.simulator import trace

COUNT = 4096
DRAWS = {
    "randn": lambda g: torch.randn(COUNT, device="npu", generator=g),
    "rand": lambda g: torch.rand(COUNT, device="npu", generator=g),
    "randint": lambda g: torch.randint(-3, 9, (COUNT,), device="npu", generator=g),
    "randperm": lambda g: torch.randperm(COUNT, device="npu", generator=g),
    "uniform": lambda g: torch.empty(COUNT, device="npu").uniform_(-1, 3, generator=g),
    "normal": lambda g: torch.empty(COUNT, device="npu").normal_(2, 0.5, generator=g),
    "bernoulli": lambda g: torch.empty(COUNT, device="npu").bernoulli_(0.25, generator=g),
    "exponential": lambda g: torch.empty(COUNT, device="npu").exponential_(2.0, generator=g),
    "multinomial": lambda g: torch.multinomial(torch.arange(4.0, device="npu"), COUNT, True, generator=g),
}
# Mean and standard deviation of each.
MOMENTS = {
    "randn": (0, 1),
    "rand": (0.5, 12**-0.5),
    "randint": (2.5, (143 / 12) ** 0.5),
    "randperm": ((COUNT - 1) / 2, ((COUNT**2 - 1) / 12) ** 0.5),
    "uniform": (1, 4 * 12**-0.5),
    "normal": (2, 0.5),
    "bernoulli": (0.25, 0.1875**0.5),
    "exponential": (0.5, 0.5),
    "multinomial": (14 / 6, (36 / 6 - (14 / 6) ** 2) ** 0.5),
}


def test_philox_draws_the_cpus_words_without_a_copy_from_the_host():
    seeds, counters = torch.tensor([[7], [-(2**62) - 3], [2**40 + 1]]), torch.tensor([0, 1, 2**32 - 1, 2**32, -1])
    there = seeds.npu(), counters.npu()
    with trace.recording() as recorded:
        words = philox.words(*there)
        uniform = philox.to_uniform(words)
    assert {event.kind for event in recorded.events} == {"call"}
    assert torch.equal(words.cpu(), philox.words(seeds, counters))
    assert torch.equal(uniform.cpu(), philox.to_uniform(philox.words(seeds, counters)))


@pytest.mark.parametrize("name", DRAWS)
def test_a_seed_repeats_and_a_generator_moves_on(name):
    generator = torch.Generator(device="npu").manual_seed(7)
    first, second = (DRAWS[name](generator).cpu() for _ in range(2))
    assert torch.equal(DRAWS[name](generator.manual_seed(7)).cpu(), first)
    assert not torch.equal(first, second)
    assert not torch.equal(DRAWS[name](generator.manual_seed(8)).cpu(), first)


@pytest.mark.parametrize("name", DRAWS)
def test_moments(name):
    drawn = DRAWS[name](torch.Generator(device="npu").manual_seed(1)).cpu().double()
    mean, spread = MOMENTS[name]
    assert abs(drawn.mean() - mean) < 5 * spread / COUNT**0.5
    assert abs(drawn.std() - spread) < 0.1 * spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_uniform_numbers_stay_below_the_upper_end(dtype):
    drawn = torch.rand(20_000, device="npu", dtype=dtype)
    assert 0 <= drawn.min() <= drawn.max() < 1


def test_the_default_generator_obeys_manual_seed():
    torch.manual_seed(3)
    first = torch.randn(8, device="npu").cpu()
    torch.manual_seed(3)
    assert torch.equal(torch.randn(8, device="npu").cpu(), first)


def test_dropout_scales_what_it_keeps_and_gives_its_mask_to_the_gradient():
    x = torch.ones(COUNT, device="npu", requires_grad=True)
    y = F.dropout(x, 0.25)
    y.sum().backward()
    kept = y.detach().cpu() != 0
    assert abs(kept.float().mean() - 0.75) < 0.05
    torch.testing.assert_close(y.detach().cpu()[kept], torch.full((int(kept.sum()),), 4 / 3))
    assert torch.equal(x.grad.cpu(), y.detach().cpu())
    assert torch.equal(F.dropout(x, 0.25, training=False), x)
