"""``hf-zeropp tune``: start a user's own command under several settings, and say which is fastest.

``command.py`` is the command, and the order of its trials. ``trial.py`` starts the job once and reads what its ranks recorded
(``hf_zeropp/step_record.py``). ``report.py`` compares trials and prints them.
"""
