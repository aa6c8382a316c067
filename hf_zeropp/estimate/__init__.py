"""Memory, bytes and step time of a job, before it starts.

In reading order: the model (``model_shape``), the cluster (``cluster``) and how the one is trained on the other
(``training_job``). What a unit exchanges (``exchanges``) gives memory and bytes (``memory_and_bytes``). A step's time is
simulated: stages of each unit (``unit_work``), their order and what follows from it (``step_time``), who runs when
(``simulation``). Methods stand side by side, with what to use (``comparison``), and are shown (``report``).
"""
