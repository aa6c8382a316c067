"""``hf-zeropp tune``: try a user's own job under several settings for a few steps each, and say which is fastest.

``command.py`` is the command and ``search.py`` the order of its trials. ``launches.py`` starts one trial and ends it. In
the ranks ``trial.py`` counts and measures steps, and ``traces.py`` notes what a script writes, so that nothing of
it stays. ``verdict.py`` compares what was measured, and ``report.py`` prints it.
"""

ENV_TRIAL = "HF_ZEROPP_TRIAL"
"""The variable that orders a trial from the ranks. It lacks the prefix of settings, since it is none."""
