"""A training script as users of torch_npu write it, which knows nothing of hal, under `hal simulate ascend`."""

from __future__ import annotations

import json

import pytest

SCRIPT = """
import json
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device(DEVICE)
torch.manual_seed(0)
x = torch.randn(64, 16)
target = (x.sum(1) > 0).long() + 2 * (x[:, 0] > 0).long()
model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for epoch in range(3):
    for batch, wanted in DataLoader(TensorDataset(x, target), batch_size=16):
        logits = model(batch.to(device))
        loss = nn.functional.cross_entropy(logits, wanted.to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
print(model[3].bias)
print(json.dumps(losses))
"""


def test_a_training_loop_learns_as_on_the_cpu(simulated, capsys):
    shown, losses = simulated(f"DEVICE = 'npu'\nimport torch_npu\n{SCRIPT}").rsplit("\n", 1)
    exec(f"DEVICE = 'cpu'\n{SCRIPT}", {})  # the same on the CPU, in this process
    expected = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "device='npu:0'" in shown
    assert json.loads(losses) == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < 0.8 * expected[0]


@pytest.mark.parametrize("soc", ["310P3", "950PR"])
def test_other_chips_run_it_too(simulated, soc):
    losses = json.loads(simulated(f"DEVICE = 'npu'\nimport torch_npu\n{SCRIPT}", "--soc", soc).splitlines()[-1])
    assert losses[-1] < 0.8 * losses[0]
