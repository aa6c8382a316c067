"""What does a step send with each Muon for sharded matrices, how long does it take, and is its update the unsharded one?

    python scripts/benchmarks/measure_optimizers.py

Rows of other packages need them: pip install muon-fsdp2 git+https://github.com/microsoft/dion. Nodes are two emulated ones of
two ranks, and bytes those of the busiest node's interface. Embeddings, head and norms are AdamW's in all rows. Three updates from
given gradients are compared with those of the same optimizer on whole weights.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from library.cluster import Cluster
from library.links import start_all
from library.pages import Grid, show
from library.rounds import cell_of, measure_in_turns
from library.sandbox import enter_sandbox
from library.study import crossing_bytes, rank_environment
from library.variants import VARIANTS, ModelShape

PACKAGES = {
    "AdamW": "torch",
    "torch.optim.Muon": "torch",
    "muon-fsdp2": "muon_fsdp2",
    "dion": "dion",
    "hf_zeropp.Muon": "torch",
}
RATE, ADAMW_RATE = 1e-3, 1e-4
NODES, RANKS_PER_NODE = 2, 2


def optimizers(name: str, matrices: list[Any], others: list[Any]) -> list[Any]:
    """Return the optimizers of a row: of the matrices of layers, and of everything else."""
    import torch

    if name == "muon-fsdp2":
        from muon_fsdp2 import Muon

        group = {"params": others, "lr": ADAMW_RATE, "use_muon": False}
        return [Muon([{"params": matrices, "lr": RATE, "use_muon": True}, group])]
    if name == "dion":
        from dion import Muon

        group = {"params": others, "lr": ADAMW_RATE, "algorithm": "adamw"}
        mesh = getattr(matrices[0], "device_mesh", None)
        return [Muon([{"params": matrices}, group], distributed_mesh=mesh, lr=RATE)]
    from hf_zeropp import Muon

    kinds: dict[str, Callable[..., Any]] = {"torch.optim.Muon": torch.optim.Muon, "hf_zeropp.Muon": Muon}
    if name in kinds:
        return [kinds[name](matrices, lr=RATE), torch.optim.AdamW(others, lr=ADAMW_RATE)]
    return [torch.optim.AdamW([*matrices, *others], lr=ADAMW_RATE)]


class _Together:
    """Several optimizers, called as one."""

    def __init__(self, name: str, params: list[Any], is_matrix: list[bool]) -> None:
        pairs = list(zip(params, is_matrix, strict=True))
        matrices, others = ([param for param, is_one in pairs if is_one is wanted] for wanted in (True, False))
        self.parts = optimizers(name, matrices, others)

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def serve(name: str, variant: str, shape: ModelShape) -> Any:
    """Return what a rank serves: a training run with the optimizers of a row."""
    import torch
    from library.training_run import TrainingRun

    class Run(TrainingRun):
        def __init__(self) -> None:
            super().__init__(VARIANTS[variant], shape, 1, 64)
            # Models of transformers have layers in ``model.layers``; embeddings, norm and head lie outside of them.
            self._is_matrix = [param.ndim == 2 and ".layers." in name for name, param in self.model.named_parameters()]
            self.optimizer = _Together(name, list(self.model.parameters()), self._is_matrix)

        def error_of_update(self) -> float:
            """The largest difference of a weight of a matrix, over the largest update, after three steps on both sides."""
            params = list(self.model.parameters())
            before = [param.full_tensor().detach().clone() for param in params]
            whole = [torch.nn.Parameter(weight.clone()) for weight in before]
            sharded, alone = (_Together(name, side, self._is_matrix) for side in (params, whole))
            for _ in range(3):
                for param, own in zip(params, whole, strict=True):
                    torch.manual_seed(own.numel())
                    gradient = torch.randn(own.shape)
                    own.grad = gradient.clone()
                    param.grad = torch.distributed.tensor.distribute_tensor(
                        gradient, param.device_mesh, param.placements
                    )
                sharded.step()
                alone.step()
            pairs = [
                ((param.full_tensor() - own).abs().max().item(), (own - start).abs().max().item())
                for param, own, start, is_one in zip(params, whole, before, self._is_matrix, strict=True)
                if is_one
            ]
            return max(error for error, _ in pairs) / max(update for _, update in pairs)

    return Run()


def main() -> None:
    """Measure all optimizers in turns, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--variant", default="balanced", choices=VARIANTS, help="how ranks communicate; stock is FSDP2 alone"
    )
    args = parser.parse_args(sys.argv[1:])
    enter_sandbox()
    shape = ModelShape(num_hidden_layers=args.layers)
    names = [name for name, package in PACKAGES.items() if importlib.util.find_spec(package)]
    model_bytes = crossing_bytes({"nodes": NODES, "model": dataclasses.asdict(shape)})
    rows = []
    with Cluster(NODES, RANKS_PER_NODE, rank_environment(1)) as cluster, contextlib.ExitStack() as stack:
        served = "measure_optimizers:serve"
        cells = start_all(stack, cluster, names, served, lambda name: (name, args.variant, shape))
        for ranks in cells.values():
            ranks.call("measure", 3, 1)  # the first steps compile, make states, and are watched
        for name, rounds in measure_in_turns(cells, 1, steps=9, seconds=60, rounds=args.rounds):
            cell = cell_of(rounds, RANKS_PER_NODE)
            # The error is measured against an update of the whole weights. muon-fsdp2 0.3.0 cannot compute that one: it calls a
            # function that does not exist.
            error = None if name == "muon-fsdp2" else max(cells[name].call("error_of_update"))
            row = {"optimizer": name, "across nodes, MB": f"{cell['link_bytes'] / 1e6:.1f}"}
            for header, key in (("of M", "link_bytes"), ("counted, of M", "counted_bytes")):
                row[header] = f"{cell[key] / model_bytes:.2f}" if cell[key] else ""
            row["s per step"] = f"{cell['step_s']:.2f}"
            row["error of the update"] = "none" if error is None else f"{error:.1e}" if error else "0"
            rows.append(row)
    title = f"{args.variant}, {shape.num_parameters / 1e6:.1f} M parameters, links without a limit"
    show([Grid.of(title, rows)], markdown=True)


if __name__ == "__main__":
    main()
