"""Seams to Accelerate, Transformers, PEFT and TRL."""

from __future__ import annotations

from hf_zeropp.compat.seam import Seam, accepts, called, has, reads, sets, takes

# fmt: off
HUGGING_FACE: tuple[Seam, ...] = (
    # Accelerate
    # The relation is not HAS, because a method that exists but is not called any more would pass, and ours in its
    # place would never run. The same holds for every function below that ours stand in for.
    reads("accelerate:Accelerator", "_prepare_fsdp2", "integrations.accelerate_frozen",
        "`prepare` calls it with a model and its optimizers. Ours takes frozen parameters out of the optimizers "
        "before. If it moved: optimizers keep 16-bit copies of packed weights.", silent=True),
    takes("accelerate:Accelerator._prepare_fsdp2", "self args", "integrations.accelerate_frozen",
        "Ours is called with the same arguments. If it moved: TypeError in `prepare`."),
    reads("accelerate.utils.fsdp_utils:fsdp2_prepare_model", "set_auto_wrap_policy", "integrations.accelerate",
        "The plugin's method is called just before a model is sharded. There frozen weights are packed, and ZeRO++ "
        "is armed. If it moved: models train on FSDP2's own collectives.", silent=True),
    reads("accelerate:Accelerator", "fsdp2_prepare_model", "integrations.axolotl",
        "Accelerate's own function is put back where Axolotl's stands, which shards frozen weights a second time. "
        "If it moved: LoRA with Axolotl raises that meshes overlap."),
    # Accelerate's ``accumulate`` and the Trainer's loop read this setting separately, so it has two seams.
    reads("accelerate:Accelerator", "sync_each_batch", "integrations.accelerate",
        "With this setting `accumulate` lets FSDP2 reduce on every micro-step. If it moved: FSDP2 keeps gradients "
        "in full size between micro-steps.", silent=True),
    has("accelerate.state:GradientState", "plugin_kwargs sync_gradients", "integrations.accelerate",
        "Where `sync_each_batch` is set; and whether a micro-step is the last."),
    sets("accelerate.state:AcceleratorState",
        "fsdp_plugin distributed_type", "integrations.accelerate integrations.trainer",
        "They are set to make the plugin active on CPU too, and in a Trainer. If it moved: Accelerate uses another "
        "plugin, and the model trains without ZeRO++.", silent=True),
    sets("accelerate.state:PartialState", "distributed_type", "integrations.accelerate",
        "Each AcceleratorState copies this value over its own. If it moved: on CPU a model is replicated, and not "
        "sharded.", silent=True),
    has("accelerate.state:AcceleratorState", "_shared_state", "integrations.accelerate integrations.launch.unmodified",
        "Whether an Accelerator was built before, and with which plugin."),
    has("accelerate.state:PartialState", "_shared_state", "integrations.accelerate",
        "The values that every PartialState of the process shares."),
    # Accelerator and Trainer each call it under a name of their own module, so each is a seam.
    reads("accelerate:Accelerator", "save_fsdp_optimizer load_fsdp_optimizer", "integrations.accelerate_checkpoints",
        "Ours stand in their places, and send whole weights after a checkpoint where deltas are the rule. If it "
        "moved: a run resumed with deltas differs from the unbroken one.", silent=True),
    accepts("accelerate.utils:save_fsdp_optimizer",
        "fsdp_plugin model", "integrations.accelerate_checkpoints",
        "The model is among its arguments. If it moved: KeyError when a checkpoint is saved."),
    accepts("accelerate.utils:load_fsdp_optimizer",
        "fsdp_plugin model", "integrations.accelerate_checkpoints",
        "The model is among its arguments. If it moved: KeyError when a checkpoint is loaded."),
    reads("accelerate:Accelerator.__init__", "ACCELERATE_USE_FSDP", "integrations.launch.unmodified",
        "The launcher asks for FSDP by this variable. A script that passes no plugin then gets ours. If it moved: "
        "such a script trains without ZeRO++, and the first optimizer step raises."),
    # Transformers: the Trainer
    # The list could stay importable while the Trainer takes its defaults from elsewhere, so its code is searched.
    reads("transformers.trainer:Trainer", "DEFAULT_CALLBACKS", "integrations.launch.default_callback",
        "A callback in this list serves scripts that pass none. If it moved: under hf_zeropp.run a Trainer without a "
        "ZeroPPCallback trains without what the callback does.", silent=True),
    reads("transformers.trainer:Trainer", "sync_each_batch", "integrations.accelerate",
        "With this setting the Trainer lets FSDP2 reduce on every micro-step. If it moved: FSDP2 keeps gradients in "
        "full size between micro-steps.", silent=True),
    reads("transformers.trainer:Trainer",
        "save_fsdp_optimizer load_fsdp_optimizer", "integrations.accelerate_checkpoints",
        "Ours stand in their places, and send whole weights after a checkpoint where deltas are the rule. If it "
        "moved: a run resumed with deltas differs from the unbroken one.", silent=True),
    called("transformers.trainer:Trainer",
        "_save_checkpoint _save_rng_state _get_output_dir", "integrations.resume integrations.trainer",
        "The mark of a whole checkpoint is removed before the first, and comes after the second on all ranks."),
    reads("transformers.trainer:Trainer._save_checkpoint",
        "_save_rng_state save_to_json rotate_checkpoints", "integrations.resume",
        "Its own last file of each rank, the mark, and the deletion of older checkpoints, in this order. If it "
        "moved: a checkpoint may be taken for whole, and older ones deleted, while a rank still writes.", silent=True),
    has("transformers.training_args:TrainingArguments", "fsdp_plugin_args", "integrations.trainer",
        "The arguments of the plugin that the Trainer builds."),
    # They are read with defaults, because the arguments of most trainers have no such fields.
    has("trl.trainer.dpo_config:DPOConfig", "sync_ref_model ref_model_sync_steps", "integrations.trainer",
        "The steps after which TRL writes new weights into a reference model. If it moved: the reference model "
        "computes with the weights it had before.", silent=True),
    # Transformers: models
    # Two relations, both silent: ours takes the place of this method, and ``generate`` has to call it.
    has("transformers.generation.utils:GenerationMixin", "_has_unfinished_sequences", "generation",
        "Ranks of a node agree in it on whether another token is needed. If it moved: all ranks agree instead, "
        "across nodes, for every token.", silent=True),
    reads("transformers.generation.utils:GenerationMixin", "_has_unfinished_sequences", "generation",
        "`generate` calls it after every token. If it moved: all ranks agree instead, across nodes, for every "
        "token.", silent=True),
    takes("transformers.generation.utils:GenerationMixin._has_unfinished_sequences",
        "self this_peer_finished synced_gpus device", "generation",
        "Ours is called with the same arguments. If it moved: TypeError in `generate`."),
    has("transformers.modeling_utils:PreTrainedModel",
        "_no_split_modules", "integrations.accelerate integrations.wrap_policy",
        "The classes of a model's blocks. If it moved: an estimate counts the whole model as one unit; a model is "
        "sharded as one unit, with a warning.", silent=True),
    sets("transformers.modeling_utils:PreTrainedModel",
        "all_tied_weights_keys", "integrations.lora.quantizer",
        "Which weights are tied, by name. If it moved: a tied weight is packed in one place and dense in the other.",
        silent=True),
    reads("transformers.initialization", "_is_hf_initialized", "frozen.weight integrations.lora.quantizer",
        "The mark keeps Transformers from initializing weights that were loaded. If it moved: random values are "
        "written into packed weights.", silent=True),
    # The class is compared by name, so that packing need not import Transformers. A new name would match nothing.
    has("transformers.pytorch_utils", "Conv1D", "frozen.packing",
        "GPT-2's linear layer, known by its name. If it moved: its weights are not packed.", silent=True),
    # Transformers: loading packed weights
    reads("transformers.quantizers.base:HfQuantizer",
        "_process_model_before_weight_loading _process_model_after_weight_loading", "integrations.lora.quantizer",
        "Ours prepare a model for a packed checkpoint, and tie packed weights after loading. If it moved: packed "
        "weights are left at random values.", silent=True),
    has("transformers.quantizers.base:HfQuantizer", "_dequantize", "integrations.lora.quantizer",
        "Ours says how to get a model in 16 bits. If it moved: `dequantize` raises an error without that advice."),
    reads("transformers.core_model_loading",
        "param_needs_quantization get_quantize_ops", "integrations.lora.quantizer",
        "Transformers asks for each tensor that it reads whether and how it is packed. If it moved: weights stay in "
        "16 bits.", silent=True),
    # PEFT
    # PEFT's attributes are read with defaults, because a model without adapters has none of them. A renamed one would
    # look like such a model.
    has("peft.tuners.tuners_utils:BaseTunerLayer", "adapter_layer_names", "frozen.adapters",
        "The modules of a layer that hold an adapter. If it moved: adapters that are not active are packed as "
        "frozen weights.", silent=True),
    has("peft.utils.other:AuxiliaryTrainingWrapper", "original_module", "frozen.adapters",
        "The module of which PEFT trains a copy. The other children are the copies. If it moved: copies that are "
        "not active are packed as frozen weights.", silent=True),
    has("peft.tuners.trainable_tokens:TrainableTokensLayer", "trainable_tokens_delta", "integrations.wrap_policy",
        "An embedding of which single tokens are trained. If it moved: sharding such a model raises."),
    called("peft:PeftModel", "get_base_model", "frozen.adapters",
        "The model that PEFT wraps. Its `generate` calls that model, past the wrapper. If it moved: frozen weights "
        "outside of blocks are not gathered in `generate`, and DTensor raises."),
    reads("peft.tuners.tuners_utils:BaseTuner", "_inject_parameters", "integrations.lora.peft_targets",
        "In it PEFT looks for `target_parameters` among a module's parameters. Ours lists packed weights there. If "
        "it moved: adapters on packed experts are left out, with a warning of PEFT's.", silent=True),
    sets("peft.tuners.tuners_utils:BaseTunerLayer", "merge unmerge", "frozen.units",
        "The layers' methods that a sharded base refuses. If it moved: PyTorch's error about tensors on two meshes."),
    has("transformers.modeling_utils:PreTrainedModel", "_tied_weights_keys", "integrations.lora.peft_targets",
        "Whether a model's class can tie weights. If it moved: as with the next.", silent=True),
    has("peft.utils.other", "_get_module_names_tied_with_embedding", "integrations.lora.peft_targets",
        "PEFT's search for modules that are tied to the embedding. Ours finds packed ones too. If it moved: single tokens "
        "that are trained (trainable_token_indices) stay untrained in a packed head.", silent=True),
    has("peft.tuners.tuners_utils", "_get_module_names_tied_with_embedding", "integrations.lora.peft_targets",
        "The same function, as the tuners know it.", silent=True),
    reads("peft.utils.other:AuxiliaryTrainingWrapper.__init__", "update", "integrations.lora.peft_targets",
        "It copies a module that is to be trained. Ours refuses packed ones. If it moved: PyTorch's error about dtypes."),
    has("peft.utils.other:ModulesToSaveWrapper", "modules_to_save", "frozen.published",
        "Copies of whole modules that PEFT trained. An engine gets them in the place of the originals."),
    has("peft:LoraConfig", "init_lora_weights", "frozen.adapters",
        "It tells whether an adapter changed its base. If it moved: adapters that did are published alone.", silent=True),
)
# fmt: on
