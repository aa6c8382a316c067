"""The statements of ranks that an agreement compares, and the error that says in which of them ranks differ."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from hf_zeropp.comm.exchange import ranks_by, words_of

SKIP_IN_A_NODE = (
    "Ranks of a node gather together, also what is frozen: a module may be skipped (a vision tower, by a batch without images) "
    "only on all ranks of the node alike. Give such a batch a placeholder, and leave its output out of the loss."
)
"""The remedy where ranks of a node part."""

NAMED_UNITS = 4
"""Units that an error names."""


class DisagreementError(RuntimeError):
    """Ranks were about to run different collectives. Raised on every rank, with the same words."""


@dataclasses.dataclass(frozen=True)
class Statement:
    """A rank's account of what it is about to do, for the error message.

    Attributes:
        action: a phrase after "is about to", such as "run a forward pass of unit layers.0".
        facts: by subject (a unit), the fact that this rank relies on.
        ran: what this rank has run since the last question, in its order; in the plural, such as "reductions of unit layers.0".
        ran_in_node: the same of what only the ranks of its node run with it.
        remedy: a sentence about what to do where other ranks are about to do something else.
    """

    action: str
    facts: dict[str, str]
    ran: tuple[str, ...] = ()
    ran_in_node: tuple[str, ...] = ()
    remedy: str = "Every rank must run the same forward and backward passes, with the same last micro-step."


def describe_difference(statements: dict[int, Statement], nodes: dict[int, int]) -> str:
    """Return what ranks disagree about, in words. ``statements`` and ``nodes`` are by rank."""
    # The message names one difference. If the ranks' next actions differ, it names these. Otherwise it names what they ran, since
    # facts often differ only because ranks ran different units.
    by_action = ranks_by((rank, statement.action) for rank, statement in statements.items())
    if len(by_action) > 1:
        said = "; ".join(f"{are_words(ranks)} about to {action}" for action, ranks in by_action.items())
        remedies = dict.fromkeys(statement.remedy for statement in statements.values())
        return f"Ranks are about to run different collectives, which would wait for ever: {said}. {' '.join(remedies)}"
    action = next(iter(by_action))
    if ran := _describe_runs({rank: statement.ran for rank, statement in statements.items()}):
        return (
            f"Ranks are about to {action}, and ran different units before: {ran}. Weights and gradients of "
            "different layers may be mixed: drop these gradients, and call handle.invalidate(). A layer may be skipped "
            "(LayerDrop, early exit, an expert without tokens) only on all ranks alike."
        )
    for ranks in ranks_by(nodes.items()).values():
        if ran := _describe_runs({rank: statements[rank].ran_in_node for rank in ranks}):
            return (
                f"Ranks are about to {action}, and {words_of(ranks)}, which are one node, gathered different units there: {ran}. "
                f"They may have computed with the weights of other layers. {SKIP_IN_A_NODE}"
            )
    # The first subject that differs is named. A cause in one unit often makes later units differ as well.
    for subject in dict.fromkeys(subject for statement in statements.values() for subject in statement.facts):
        by_fact = ranks_by((rank, statement.facts.get(subject, "nothing")) for rank, statement in statements.items())
        if len(by_fact) > 1:
            said = "; ".join(f"{words_of(ranks)}: {fact}" for fact, ranks in by_fact.items())
            return (
                f"Ranks must agree before they {action}, but {subject} differs: {said}. Change the model, and "
                "use its parameters, on all ranks alike."
            )
    facts = next(iter(statements.values())).facts
    return f"Ranks disagree about {action}, though their descriptions are equal: {facts}."


def _describe_runs(runs: dict[int, tuple[str, ...]]) -> str:
    """Return how the ranks differ in what they ran, and how often; nothing where they do not."""
    counts = {rank: Counter(run) for rank, run in runs.items()}
    entries = dict.fromkeys(sum(runs.values(), ()))
    differing = [entry for entry in entries if len({count[entry] for count in counts.values()}) > 1]
    said = []
    for entry in differing[:NAMED_UNITS]:
        by_count = ranks_by((rank, count[entry]) for rank, count in counts.items())
        said.append(f"{entry}: {', '.join(f'{times} on {words_of(ranks)}' for times, ranks in by_count.items())}")
    if len(differing) > NAMED_UNITS:
        said.append(f"and {len(differing) - NAMED_UNITS} more differ")
    if not said and len(set(runs.values())) > 1:
        place = next(index for index, ran in enumerate(zip(*runs.values(), strict=True)) if len(set(ran)) > 1)
        by_entry = ranks_by((rank, run[place]) for rank, run in runs.items())
        order = ", ".join(f"{entry} on {words_of(ranks)}" for entry, ranks in by_entry.items())
        said.append(f"the order differs, first in {order}")
    return "; ".join(said)


def are_words(ranks: Sequence[int]) -> str:
    """Return "rank 3 is", or "ranks [0, 1] are"."""
    return f"{words_of(ranks)} {'are' if ranks[1:] else 'is'}"
