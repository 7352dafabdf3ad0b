"""Graphs on the simulated CANN under torch_npu's own NPUGraph: what is captured is recorded, and runs when replayed."""

from __future__ import annotations

import pytest
import torch
import torch_npu

from hal import host
from hal.backends.ascend.simulator import runtime, trace
from hal.capability import Declares, Implementation
from hal.conformance.cases import family
from hal.conformance.judge import judge
from hal.contract import OPS
from hal.errors import CaptureError


def npu(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype).npu()


def capture(call):
    """The graph of a call, and its result."""
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = call()
    return graph, result


def replayed(graph, *results):
    graph.replay()
    torch.npu.synchronize()
    return [t.cpu() for t in results]


def test_a_capture_records_and_a_replay_runs_in_order_at_the_values_of_then():
    x, total = npu(1.0, 2.0, 3.0), npu(0.0)

    def call():
        total.add_(x.sum())
        kept = x.clone()
        x.mul_(2)
        return kept, torch.zeros(3, device="npu"), x[1:] + total

    # torch_npu 2.10 fills the random generator's seed and offset whenever a capture begins, 2.13 fills nothing.
    with trace.recording() as begun:
        capture(lambda: None)
    assert [event.operator for event in begun.calls] in ([], ["aclnnInplaceFillScalar"] * 2)
    with trace.recording() as recorded:
        graph, results = capture(call)
    assert recorded.calls == begun.calls, "a capture must run nothing of what it captures"
    assert x.tolist() == [1.0, 2.0, 3.0] and total.item() == 0
    assert all(torch.isnan(t.cpu()).all() for t in results), "a capture must compute nothing: fresh memory is poison"

    with trace.recording() as recorded:
        kept, zeros, shifted = replayed(graph, *results)
    assert [event.operator for event in recorded.calls][:2] == ["aclnnReduceSum", "aclnnInplaceAdd"]
    assert kept.tolist() == [1.0, 2.0, 3.0] and zeros.tolist() == [0.0] * 3 and shifted.tolist() == [10.0, 12.0]

    x.fill_(5)
    kept, _, shifted = replayed(graph, *results)
    assert kept.tolist() == [5.0] * 3 and total.item() == 21 and shifted.tolist() == [31.0, 31.0]


def test_what_the_host_knew_at_the_capture_is_kept():
    lengths, x = npu(2, dtype=torch.int64), npu(1.0, 1.0, 1.0, 1.0)
    count = int(lengths.item())
    graph, (part, scaled) = capture(lambda: (x[:count].sum(), x * torch.tensor(3.0)))
    lengths.fill_(4)
    part, scaled = replayed(graph, part, scaled)
    assert part.item() == 2, "a number that the host read is one of the capture's"
    assert scaled.tolist() == [3.0] * 4, "a tensor of the host is one of the capture's, and outlives its memory"


@pytest.mark.parametrize("careful", [True, False])
def test_conformance_sees_a_call_that_keeps_a_host_number(careful):
    known = {}

    def paged(seq_lens, **arguments):
        if torch.npu.is_current_stream_capturing():
            seq_lens = seq_lens if careful else torch.full_like(seq_lens, known["longest"])
        else:
            known["longest"] = int(seq_lens.max())
        return OPS["paged_attention"].reference(seq_lens=seq_lens, **arguments)

    candidate = Implementation("paged_attention", "candidate", paged, declares=Declares(capturable=True))
    case = family("paged_attention").case("float32", "edge", q=[1], k=[32])
    found = judge(case, candidate, "npu")
    reasons = [finding.message for finding in found.findings]
    assert not reasons if careful else all("as a graph captured at other lengths" in reason for reason in reasons)
    assert found.status == ("passed" if careful else "failed")


def test_the_stream_knows_that_it_is_captured():
    assert not torch.npu.is_current_stream_capturing()

    def call():
        inside = torch.npu.is_current_stream_capturing(), host.capturing(torch.device("npu"))
        with torch.npu.stream(torch.npu.Stream()):
            return (*inside, torch.npu.is_current_stream_capturing())

    assert capture(call)[1] == (True, True, False)
    assert not torch.npu.is_current_stream_capturing()


def test_hal_refuses_what_needs_the_host_before_any_work():
    lengths = npu(1, 2, dtype=torch.int32)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph), pytest.raises(CaptureError, match=r"pass the \*_cpu lengths"):
        host.to_host(lengths, "attention")
    with torch.npu.graph(torch.npu.NPUGraph()):
        pass
    graph.replay()


@pytest.mark.parametrize(
    ("forbidden", "call", "code"),
    [
        (lambda x: torch.npu.synchronize(), "aclrtSynchronizeDevice", 107027),
        (lambda x: torch.npu.current_stream().synchronize(), "aclrtSynchronizeStream", 107027),
        (lambda x: torch.npu.current_stream().query(), "aclrtStreamQuery", 107027),
        (lambda x: x.cpu(), "aclrtSynchronizeStream", 107027),
        (lambda x: x.item(), "aclrtSynchronizeStream", 107027),
        (lambda x: x.nonzero(), "aclrtSynchronizeStream", 107027),
        (lambda x: torch.npu.current_stream().record_event().query(), "aclrtQueryEventStatus", 107028),
        (lambda x: torch.npu.current_stream().record_event().synchronize(), "aclrtSynchronizeEvent", 107028),
    ],
)
def test_what_waits_in_a_capture_invalidates_it(forbidden, call, code):
    x = npu(1.0)
    caught = []

    def inside():
        try:
            forbidden(x)
        except RuntimeError as error:
            caught.append(str(error))
        with pytest.raises(RuntimeError, match=f"capture was invalidated before: {call}"):
            x + 1

    with pytest.raises(RuntimeError, match=f"507903[\\s\\S]*capture was invalidated before: {call}"):
        capture(inside)
    assert len(caught) == 1 and str(code) in caught[0]
    graph, doubled = capture(lambda: x * 2)
    assert replayed(graph, doubled)[0].item() == 2, "the next capture must not suffer from the one before"


def test_copies_within_a_capture():
    x, pinned = npu(1.0, 2.0), torch.zeros(2).pin_memory()
    target = torch.zeros(2).pin_memory()

    def call():
        x.copy_(pinned, non_blocking=True)
        target.copy_(x, non_blocking=True)

    graph, _ = capture(call)
    pinned.fill_(7)
    assert x.tolist() == [1.0, 2.0]
    replayed(graph)
    assert x.tolist() == target.tolist() == [7.0, 7.0]


def test_streams_that_join_a_capture_must_join_back():
    x, side = npu(1.0), torch.npu.Stream()

    def fork(back):
        y = x + 1
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            z = y * 10
        if back:
            torch.npu.current_stream().wait_stream(side)
        return z

    graph, z = capture(lambda: fork(True))
    x.fill_(2)
    assert replayed(graph, z)[0].item() == 30
    with pytest.raises(RuntimeError, match=r"107025[\s\S]*did not join back"):
        capture(lambda: fork(False))


def test_an_event_of_outside_cannot_be_waited_for():
    x = npu(1.0)
    before = torch.npu.current_stream().record_event()
    with pytest.raises(RuntimeError, match=r"507903[\s\S]*an event that was recorded outside it"):
        capture(lambda: (before.wait(), x + 1))


def test_other_streams_work_on_while_one_is_captured():
    x, other = npu(1.0), torch.npu.Stream()

    def call():
        with torch.npu.stream(other):
            x.add_(1)
        return x * 3

    graph, tripled = capture(call)
    assert x.item() == 2
    assert replayed(graph, tripled)[0].item() == 6


def test_values_are_checked_when_the_graph_runs():
    logits, p, k = torch.zeros(2, 8, device="npu"), torch.full((2,), 7.0, device="npu"), npu(1, 2, dtype=torch.int32)
    graph, kept = capture(lambda: torch_npu.npu_top_k_top_p(logits, p, k))
    with pytest.raises(RuntimeError, match="p is from 0 to 1, but found 7 to 7"):
        graph.replay()
    p.fill_(0.5)
    assert replayed(graph, kept)[0].shape == (2, 8)
    with pytest.raises(RuntimeError, match="k is int32"):
        torch_npu.npu_top_k_top_p(logits, p, k.long())


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(1000, device="npu"),
        lambda: torch.randn(1000, device="npu"),
        lambda: torch.randint(0, 1 << 20, (1000,), device="npu"),
    ],
)
def test_random_numbers_differ_within_a_graph_and_between_replays(draw):
    torch.npu.manual_seed(0)
    graph, drawn = capture(lambda: (draw(), draw()))
    first, second = replayed(graph, *drawn), replayed(graph, *drawn)
    assert not any(torch.equal(a, b) for a, b in ((*first,), (first[0], second[0]), (first[1], second[1])))
    torch.npu.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(replayed(graph, *drawn), first, strict=True))


def test_a_graph_gives_back_what_it_held():
    bridge = runtime.attached()
    before = len(bridge._kept)
    graph, _ = capture(lambda: torch.ones(3, device="npu") + 1)
    assert len(bridge._kept) == before + 2
    del graph
    assert len(bridge._kept) == before
