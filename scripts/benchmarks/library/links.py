"""Cells of a study, one for each link and variant, measured on ranks that exist side by side.

The ranks of all variants exist at the same time, so that variants can take turns. Ranks that are not being measured wait for
a message, and take no processor time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from library.cluster import Cluster, Ranks
from library.network import have_latencies
from library.study import Key, Study, rank_environment

Arguments = Callable[[str], tuple[Any, ...]]
TRAINING = "library.training_run:run_of"
"""It makes an object on each rank in most studies; the study calls its methods (``Cluster.start``)."""


def start_all(
    stack: contextlib.ExitStack, cluster: Cluster, names: Iterable[str], served: str, arguments: Arguments
) -> dict[str, Ranks]:
    """Start the ranks of each variant once, by name. They end with the stack.

    Args:
        stack: of contexts.
        cluster: where they start.
        names: of variants.
        served: as for ``Cluster.start``.
        arguments: returns those of ``served`` for a variant's name.
    """
    return {name: stack.enter_context(cluster.start(served, *arguments(name))) for name in dict.fromkeys(names)}


def measure_cells(
    study: Study,
    keys: Iterable[Key],
    variant_of: Callable[[Key], str],
    served: str,
    arguments: Arguments,
    measure: Callable[[Ranks, Key], dict[str, Any]],
) -> None:
    """Measure the cells that a study lacks, one after the other.

    Args:
        study: takes a row of kind ``cells`` per key. Nodes and ranks are those of its conditions.
        keys: of all cells. ``rate`` is that of the link.
        variant_of: returns the name of the variant whose ranks a key needs.
        served: of ``start_all``.
        arguments: of ``start_all``.
        measure: returns the row behind its key.
    """
    if not (missing := study.missing("cells", keys)):
        return
    nodes = study.conditions["nodes"], study.conditions["ranks_per_node"]
    delayed = have_latencies({key["rate"] for key in missing})
    with Cluster(*nodes, rank_environment(threads=1), delayed=delayed) as cluster, contextlib.ExitStack() as stack:
        runs = start_all(stack, cluster, map(variant_of, missing), served, arguments)
        for key in missing:
            print(*key.values(), sep=", ", flush=True)
            cluster.set_link(key["rate"])
            study.add("cells", key | measure(runs[variant_of(key)], key))
