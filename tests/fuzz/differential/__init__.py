"""A differential fuzz of ``apply_zeropp``: random programs, run under ZeRO++, under stock FSDP2 and on one unsharded model.

Reading order: ``cases`` (what a program is), ``networks`` and ``sides`` (how each of the three runs it), ``compare`` (when
two runs agree), ``pool`` (worker processes and the watchdog), ``hazards`` and ``generate`` (random programs), ``minimize``,
``campaign`` (many programs, and the summary), ``planted`` (bugs that prove that the fuzz finds bugs).
"""
