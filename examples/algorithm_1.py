"""FedSpa with DST (the paper's Algorithms 1 and 3) on two clients in plain torch, then by fedspa: how far they differ.

python examples/algorithm_1.py
"""

import math
import tempfile
from fractions import Fraction

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fedspa
from fedspa.core.packed_mask import PackedMask
from fedspa.core.randomness import generator
from fedspa.core.weights import ParameterSpace
from fedspa.layer_sparsity.erk import ErdosRenyiKernel
from fedspa.masks.initial import random_mask

ROUNDS, EPOCHS, BATCH, LR, ALPHA, SEED = 5, 2, 8, 0.1, 0.5, 0
torch.manual_seed(SEED)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3)).double()
layers = ParameterSpace.of(model)
x = torch.randn(80, 10, dtype=torch.float64)
y = x[:, :3].argmax(1)
rows = [torch.arange(0, 30), torch.arange(30, 80)]  # of each client


def gradient(w: Tensor, batch: Tensor) -> Tensor:
    vector_to_parameters(w, model.parameters())
    loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
    return parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))


def local_training(k: int, t: int, w: Tensor, mask: Tensor) -> Tensor:
    """N steps under the fixed mask (Eq. 3)."""
    order = generator(SEED, "batches", t, k)
    for _ in range(EPOCHS):
        for batch in rows[k][torch.randperm(len(rows[k]), generator=order)].split(BATCH):
            w = w - LR * mask * gradient(w, batch)
    return w


def next_mask(k: int, t: int, w: Tensor, mask: Tensor) -> Tensor:
    """In each layer, drop the smallest weights and grow as many of largest gradient (Algorithm 3)."""
    share = ALPHA / 2 * (1 + math.cos(math.pi * t / (ROUNDS - 1)))
    batch = torch.randperm(len(rows[k]), generator=generator(SEED, "mask_search", t, k))[:BATCH]
    active = mask.bool()
    for on, weight, slope in zip(*map(layers.split, (active, w, gradient(w, rows[k][batch]))), strict=True):
        count = math.ceil(share * int(on.sum()) - 1e-9)
        on[weight.abs().masked_fill(~on, math.inf).argsort(stable=True)[:count]] = False
        on[slope.abs().masked_fill(on, -1).argsort(stable=True, descending=True)[:count]] = True
    return active.to(w)


federation = fedspa.Federation(
    data=(x, y), clients=rows, test=(x, y), test_clients=rows, model=model, method="fedspa", sparsity=0.5,
    mask={"alpha0": ALPHA}, rounds=ROUNDS, epochs=EPOCHS, batch_size=BATCH, lr=LR, lr_decay=1.0, weight_decay=0.0,
    clip_norm=None, seed=SEED, hardware={"precision": "64-true", "workers": 1}, folder=tempfile.mkdtemp(),
)  # fmt: skip
w = parameters_to_vector(model.parameters()).detach()
counts = ErdosRenyiKernel().active_counts(layers.shapes, 1 - Fraction("0.5"))
masks = [random_mask(layers, counts, generator(SEED, "initial_mask")).to(w) for _ in rows]
for t in range(ROUNDS):
    updates = []
    for k in range(2):  # both take part
        start = masks[k] * w
        end = local_training(k, t, start, masks[k])
        masks[k] = next_mask(k, t, end, masks[k])
        updates.append(start - end)
    w = w - sum(updates) / len(updates)

folder = federation.run().folder
weights, bits = (load_file(folder / f"{name}.safetensors") for name in ("weights", "masks"))
theirs = torch.cat([weights[name].flatten() for name in layers.names])
assert all(torch.equal(PackedMask(bits[str(k)], layers.total).unpack(like=w), masks[k]) for k in range(2))
print(f"largest difference: {(theirs - w).abs().max():.1e}; the masks are the same")
