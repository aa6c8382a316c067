"""One fault after another against a real run. In reading order:

``fault.py`` (what strikes, where, and how both are drawn from a seed), ``jobs.py`` (what is struck), ``strike.py`` (the struck
rank counts its calls up to the one at which the fault happens), ``place.py`` (private disks, and what is left behind),
``verdict.py`` (one fault from its start to the resumed run), ``campaign.py`` (many of them, and their table).
"""
