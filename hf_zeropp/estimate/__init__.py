"""Memory, bytes and step time of a job, before it starts.

In reading order: the model (``model_shape``), the cluster (``cluster``) and how the one is
trained on the other (``training_job``). What a unit exchanges (``exchanges``) gives memory and bytes (``memory_and_bytes``,
``memory_report``). A step's time is simulated: stages of each unit (``unit_work``), their order (``step_order``), who runs when
(``simulation``), and what follows for a method (``step_time``) and for a choice of them (``comparison``, ``step_time_report``).
"""
