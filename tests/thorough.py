"""The tests that the whole suite runs with ``--all`` alone: more of a promise that another test holds already.

A pattern is one of ``fnmatch`` for a test's id behind ``tests/``, with ``{`` and ``}`` in place of brackets, which mean something
else there. A run with ``--all`` fails where a pattern names no test.
"""

from __future__ import annotations

import fnmatch

THOROUGH = (
    # Reductions that block take the way of the streams' first part; those that overlap are what a CPU runs by default.
    "fsdp/test_*blocking}",
    # Other worlds, dtypes and lengths of what one case shows.
    "fsdp/test_comm_objects.py::test_gradients_are_the_mean_over_ranks{6*",
    "fsdp/test_comm_objects.py::test_gradients_are_the_mean_over_ranks{4-1*",
    "fsdp/test_comm_objects.py::test_hpz_alone*",
    "fsdp/test_exact.py::test_exact{in_every_dtype*",
    "fsdp/test_exact.py::test_over_many_steps*",
    "fsdp/test_accumulator.py::test_accumulator{every_dtype*",
    "fsdp/test_apply.py::test_threads_go_with_their_model",
    "fsdp/test_failed_hops.py::test_a_rank_without_data_is_named{goes on}",
    "comm/*{6}",
    "comm/*{3}",
    "frozen/test_storage.py::*",
    "frozen/test_frozen_peft.py::*{8*",
    # Other trainers, examples and launchers than the first of their kind.
    "integrations/test_trainer_orders.py::test_torch_compile*",
    "integrations/test_trainer_orders.py::test_train_evaluate_train*",
    "integrations/test_trainer_orders.py::test_evaluation_sees*",
    "integrations/test_rlhf_examples.py::*",
    "integrations/test_one_box.py::*",
    "integrations/test_trl.py::test_offline_trainers{kto*",
    "integrations/test_trl.py::test_offline_trainers{reward*",
    "integrations/test_trl.py::test_offline_trainers{dpo_reference*",
    "integrations/test_trl.py::test_online_trainers{rloo*",
    "integrations/test_unmodified.py::test_a_script_that_never_shards*",
    "integrations/test_unmodified.py::test_an_unmodified_script_of_trl*",
    "integrations/test_trainer_death.py::*in a save}",
    "integrations/test_trainer_checkpoints.py::test_sharded_checkpoint_resumes_on_another_shape*",
    "integrations/test_trainer_checkpoints.py::test_accelerate_merges*",
    "integrations/test_quantizer.py::test_the_16_bit_model_is_never_in_memory*",
    "integrations/test_export.py::*",
    "rollouts/test_trl_async.py::*",
    "rollouts/test_trl_server.py::*",
    "rollouts/test_trl_sync.py::*RLOO*",
    "rollouts/test_publishing.py::test_adapters_in_16_bits*",
    "rollouts/test_publishing.py::test_one_unit_is_gathered*",
    # Studies. Each has a quick form, and none is part of the package.
    "test_benchmarks.py::*",
    "test_quantizers.py::*",
    "test_error_probe.py::*",
    "test_recorded_step.py::*",
)


def is_thorough(nodeid: str) -> bool:
    """Return whether a test of this id is left to ``--all``."""
    return any(fnmatch.fnmatchcase(_name(nodeid), pattern) for pattern in THOROUGH)


def patterns_without_tests(nodeids: list[str]) -> list[str]:
    """Return the patterns that name none of the tests."""
    names = [_name(nodeid) for nodeid in nodeids]
    return [pattern for pattern in THOROUGH if not fnmatch.filter(names, pattern)]


def _name(nodeid: str) -> str:
    return nodeid.removeprefix("tests/").replace("[", "{").replace("]", "}")
