"""The tests that the whole suite runs with ``--all`` alone, for time.

Most hold more of a promise that another test holds already. Some hold the only proof of a promise at the edge: of a mode that few
use (``compiled_optimizer``), of a cost (``callback_costs``), of an order of operations (``evaluation_before_between``).

A pattern is one of ``fnmatch`` for a test's id behind ``tests/``, with ``{`` and ``}`` in place of brackets, which mean something
else there. A run with ``--all`` fails where a pattern names no test.
"""

from __future__ import annotations

import fnmatch

THOROUGH = (
    # Reductions that block take the way of the streams' first part; those that overlap are what a CPU runs by default.
    "fsdp/test_*blocking}",
    # Compiling takes long: the blocks are compiled by default, the optimizer and the model here.
    "fsdp/test_compiled.py::test_compiled{compiled_model*",
    "fsdp/test_compiled.py::test_compiled{compiled_optimizer*",
    # The same promise once more, in another form or from another side.
    "fsdp/test_accumulation.py::*divide_factors_that_change*",
    "fsdp/test_accumulator.py::*the_error_is_that_of_bf16*",
    "fsdp/test_accumulate_on_rank.py::*every_dtype_quantized*",
    "fsdp/test_answers.py::*another_model_in_a_backward_pass*",
    "fsdp/test_delta.py::*every_size_of_a_copy_and_every_dtype*",
    "fsdp/test_delta.py::*half_a_model*",
    "fsdp/test_exact.py::*other_ways_of_the_same_bytes*",
    "fsdp/test_experts.py::*a_look_between_micro_steps*",
    "fsdp/test_secondary_check.py::*values}",
    "fsdp/test_secondary_check.py::*unquantized}",
    "fsdp/test_secondary_check.py::*delta}",
    "fsdp/test_secondary_check.py::*copies on one rank}",
    "fsdp/test_secondary_check.py::*through sockets}",
    "fsdp/test_other_parallelism.py::test_tensor_parallelism_with_default_settings",
    "fsdp/test_other_parallelism.py::test_a_killed_rank_ends_all_stages{last stage}",
    "fsdp/test_pytorch_2d.py::*every_way*",
    "fsdp/test_pytorch_2d.py::*{delays*",
    "fsdp/test_pytorch_2d.py::*{shards_of_columns*",
    "fsdp/test_pytorch_2d.py::*{materialized_later*",
    "fsdp/test_pytorch_2d.py::*{clipping*",
    "fsdp/test_pytorch_2d.py::*{*8 ranks}",
    "fsdp/test_sharded_checkpoints.py::*fsdp*",
    "fsdp/test_extensions.py::test_trains_as_stock_and_names_the_units{*unquantized}",
    "fsdp/test_extensions.py::test_trains_as_stock_and_names_the_units{*no copies}",
    "fsdp/test_extensions.py::test_trains_as_stock_and_names_the_units{replicas-exact}",
    # Other worlds, dtypes and lengths of what one case shows.
    "fsdp/test_*::test_any_number_of_nodes{8}",
    "fsdp/test_*::test_any_number_of_nodes{2}",
    "fsdp/test_comm_objects.py::test_gradients_are_the_mean_over_ranks{2*",
    "fsdp/test_comm_objects.py::test_gradients_are_the_mean_over_ranks{3*",
    "fsdp/test_comm_objects.py::test_gradients_are_the_mean_over_ranks{8*",
    "fsdp/test_comm_objects.py::test_gradients_are_the_mean_over_ranks{6*",
    "fsdp/test_comm_objects.py::test_gradients_are_the_mean_over_ranks{4-1*",
    "fsdp/test_comm_objects.py::test_hpz_alone*",
    "fsdp/test_exact.py::test_exact{in_every_dtype*",
    "fsdp/test_exact.py::test_over_many_steps*",
    "fsdp/test_accumulator.py::test_accumulator{every_dtype*",
    "fsdp/test_apply.py::test_threads_go_with_their_model",
    "fsdp/test_native_gathers.py::*every mode}",
    "fsdp/test_muon.py::*collectives_count*",
    "fsdp/test_muon.py::*a_step_that_raises*",
    "fsdp/test_failed_hops.py::test_a_rank_without_data_is_named{goes on}",
    "comm/*{6}",
    "comm/*{3}",
    "frozen/test_storage.py::*",
    "frozen/test_frozen_peft.py::*{None*",
    "estimate/test_step_time.py::test_what_is_recommended_is_never_slower{7B-256}",
    "estimate/test_step_time.py::test_what_is_recommended_is_never_slower{70B*",
    "estimate/test_estimate.py::test_ours_under_other_settings{half a model}",
    "estimate/test_estimate.py::test_ours_under_other_settings{secondary of*",
    "estimate/test_estimate.py::test_ours_under_other_settings{no secondary}",
    "estimate/test_estimate.py::test_ours_is_what_a_run_holds_and_sends{1*",
    "estimate/test_estimate_lora.py::test_a_run_holds_and_sends_what_is_estimated{codes as floats}",
    "estimate/test_step_order.py::test_the_order_is_that_of_the_code{*False*",
    "estimate/test_step_order.py::test_the_order_is_that_of_the_code{delta*",
    "estimate/test_step_order.py::test_the_order_is_that_of_the_code{INT8*3}",
    "estimate/test_step_order.py::test_the_order_is_that_of_the_code{default-True-1}",
    "estimate/test_step_order.py::test_the_order_of_stock_fsdp2*",
    "estimate/test_step_order.py::test_gradients_kept_on_the_rank",
    "fuzz/test_fuzz.py::test_slice{longer}",
    "ops/test_cuda_emulation.py::test_random_cases{[4-9]}",
    "ops/test_cuda_emulation.py::test_random_cases{1?}",
    "ops/test_cuda_emulation.py::test_matmul_by_tensor_cores_is_near_the_exact_product{*-[14589]-?}",
    "ops/test_cuda_emulation.py::test_matmul_by_tensor_cores_is_near_the_exact_product{*-17-?}",
    "ops/test_triton.py::test_some_interpreted_cases",
    "frozen/test_frozen_peft.py::*{8*",
    # Other trainers, examples and launchers than the first of their kind.
    "integrations/test_trainer.py::test_losses_follow_stock_and_bytes_follow_the_prediction{plain}",
    "integrations/test_trainer.py::test_accumulation_on_the_rank*",
    "integrations/test_trainer_checkpoints.py::test_resume_is_exact*rank}",
    "integrations/test_trainer.py::test_callback_costs_under_2_percent_of_a_step",
    "integrations/test_accelerate.py::test_training_resumes_bit_for_bit{FULL*",
    "integrations/test_accelerate.py::*a_model_that_is_never_used_is_not_kept*",
    "integrations/test_trainer_launch.py::test_example_with_muon",
    "integrations/test_trainer_orders.py::test_torch_compile*",
    "integrations/test_trainer_orders.py::test_evaluation_before_between*",
    "integrations/test_trainer_orders.py::test_model_sharded_at_load{1}",
    "integrations/test_trainer_orders.py::test_model_sharded_at_load_through_accelerate",
    "integrations/test_trainer_orders.py::test_train_evaluate_train*",
    "integrations/test_trainer_orders.py::test_evaluation_sees*",
    "integrations/test_rlhf_examples.py::*",
    "integrations/test_one_box.py::*",
    "integrations/test_trl.py::test_offline_trainers{kto*",
    "integrations/test_trl.py::test_offline_trainers{sft*",
    "integrations/test_trl.py::test_reference_model_left_to_fsdp2*",
    "integrations/test_trl.py::test_offline_trainers{reward*",
    "integrations/test_trl.py::test_offline_trainers{dpo_reference*",
    "integrations/test_trl.py::test_online_trainers{rloo*",
    "integrations/test_unmodified.py::test_a_script_that_never_shards*",
    "integrations/test_unmodified.py::test_an_unmodified_script_of_trl*",
    "integrations/test_tune.py::test_bad_scripts{*",
    "integrations/test_tune.py::test_a_script_that_never_shards",
    "integrations/test_tune.py::test_replicas",
    "integrations/test_tune.py::test_a_trainer_with_settings_of_its_own",
    "integrations/test_tune.py::test_one_trial_through_the_launcher",
    "integrations/test_tune.py::test_two_nodes_behind_torchrun_decide_alike",
    "integrations/test_tune.py::test_an_interrupted_search_leaves_no_process{*",
    "integrations/test_trainer_checkpoints.py::test_resume_is_exact*{FULL*",
    "integrations/test_trainer_checkpoints.py::test_full_state_load*",
    "integrations/test_trainer_checkpoints.py::test_sharded_checkpoint_resumes_on_another_shape*",
    "integrations/test_trainer_checkpoints.py::test_accelerate_merges*",
    "integrations/test_quantizer.py::test_the_16_bit_model_is_never_in_memory*",
    "integrations/test_export.py::*",
    "rollouts/test_trl_async.py::*",
    "rollouts/test_trl_server.py::*",
    "rollouts/test_trl_sync.py::*RLOO*",
    "integrations/test_meshes.py::test_experts_on_a_mesh_of_their_own_with_every_carrier{ep within nodes}",
    "integrations/test_meshes.py::test_experts_on_a_mesh_of_their_own_with_every_carrier{whole experts}",
    "integrations/test_meshes.py::test_experts_on_a_mesh_of_their_own_with_every_carrier{dp_replicate x fsdp x ep}",
    "integrations/test_meshes.py::test_model_sharded_at_load{fsdp}",
    "integrations/test_meshes.py::test_model_sharded_at_load{dp_replicate x fsdp x *}",
    "integrations/test_meshes.py::test_model_sharded_at_load{ep within nodes}",
    "integrations/test_meshes.py::test_model_sharded_at_load{whole experts}",
    "integrations/test_meshes.py::test_adapters_beside_frozen_experts",
    "integrations/test_meshes.py::test_other_families_of_experts{*auto}",
    "integrations/test_meshes.py::test_other_families_of_experts{mixtral*",
    "integrations/test_meshes.py::test_full_weights_are_saved_and_loaded_and_a_killed_rank_ends_all{fsdp}",
    "integrations/test_meshes.py::test_full_weights_are_saved_and_loaded_and_a_killed_rank_ends_all{*tp}",
    "integrations/test_meshes.py::test_other_micro_steps_on_some_ranks_raise_on_all{*tp}",
    "integrations/test_meshes.py::test_pytorch_has_no_context_parallel_attention_for_cpus",
    "integrations/test_meshes.py::test_peft_has_no_adapters_on_experts_of_other_ranks",
    "integrations/test_launched_meshes.py::test_accelerate_takes_no_such_model_where_its_file_says_fsdp",
    "integrations/test_launched_meshes.py::test_the_command_runs_a_script_whose_model_is_sharded_at_load",
    "rollouts/test_publishing.py::test_adapters_in_16_bits*",
    "rollouts/test_publishing.py::test_one_unit_is_gathered*",
    # It compiles the kernels once more.
    "test_packaging.py::test_a_wheel_works_without_a_compiler",
    # Other families than Llama, Mixtral, T5, LLaVA, Qwen2-Audio and SigLIP, and other modes of these.
    "zoo/test_zoo.py::*{[!l]*, LoRA 4 bit}",
    "zoo/test_zoo.py::*{lfm2*",
    "zoo/test_zoo.py::*LoRA 16 bit}",
    "zoo/test_zoo.py::*{vit*",
    "zoo/test_zoo.py::*{bert*",
    "zoo/test_zoo.py::*{whisper*",
    "zoo/test_zoo.py::*{qwen2_audio, generate}",
    "zoo/test_zoo.py::*{llava, generate*",
    # Tests that take seconds. A shorter test holds the same promise, or few users meet it.
    "faults/test_faults.py::*",
    "comm/test_agreement.py::test_a_channel_takes_its_threads_along",
    "comm/test_gloo_exit.py::*",
    "fsdp/test_beside.py::test_streams_change_no_bit",
    "fsdp/test_decisions.py::test_a_stopped_rank_ends_all_others_within_the_timeout{*",
    "fsdp/test_delta.py::test_switching_adapters",
    "fsdp/test_exact.py::test_adapters*",
    "fsdp/test_failed_hops.py::test_a_long_wait_is_logged_and_goes_on",
    "fuzz/test_oracle.py::test_nothing_is_found_where_nothing_is_planted",
    "ops/test_cuda_build.py::test_16_bytes_at_a_time_and_no_local_memory{*",
    "integrations/test_accelerate.py::test_loading_on_rank_0_alone",
    "integrations/test_resume.py::test_older_checkpoints_stay_until_all_ranks_have_saved",
    "integrations/test_trainer.py::test_losses_follow_stock_and_bytes_follow_the_prediction{bf16*",
    "integrations/test_trainer.py::test_schedule_changes_the_bytes_at_half_the_steps",
    "integrations/test_trainer.py::test_tensorboard_receives_the_figures",
    "integrations/test_trainer_checkpoints.py::test_load_best_model_at_end{*",
    "integrations/test_trl.py::test_reference_model_sync_is_seen",
    "integrations/test_unmodified.py::test_a_plain_accelerate_script",
    "rollouts/test_trl_sync.py::test_nothing_is_imported_without_use_vllm",
    "test_cli.py::test_the_stock_launcher_with_a_config_file_variable",
    "test_harness.py::test_peers_of_a_stopped_rank_fail_after_the_timeout_of_their_group",
    # Studies. Each has a quick form, and none is part of the package.
    "test_benchmarks.py::*",
    "test_quantizers.py::*",
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
