"""``python -m hf_zeropp.run SCRIPT ARGUMENTS``: run a script that does not know this package under ZeRO++.

``hf-zeropp launch`` starts every rank with it. Behind another launcher it stands in front of the script:

    torchrun --nproc-per-node 4 -m hf_zeropp.run run_clm.py --fsdp full_shard ...
    ACCELERATE_USE_FSDP=true FSDP_VERSION=2 torchrun --nproc-per-node 4 -m hf_zeropp.run script_of_accelerate.py
    accelerate launch --config_file fsdp.yaml -m hf_zeropp.run -m trl.scripts.sft ...

The script finds the process as Python would have left it: ``__main__``, ``sys.argv`` and ``sys.path[0]`` are its own. It differs
in one thing: torch and the Hugging Face libraries are imported already. Variables that they read when they are imported
(``HF_HOME``) must be set in the shell, and not in the script.

Launchers of other tools do the same (``coverage run``, ``debugpy``, ``python -m pdb``). The alternatives are worse: a
``sitecustomize.py`` or a ``.pth`` file would act on every Python process of the environment and could be hidden by another one,
and a hook of the launcher alone would not reach the ranks, which are new processes.
"""

from __future__ import annotations

import os
import runpy
import sys

from hf_zeropp.integrations.launch.unmodified import check_use, put_in_force

USAGE = "usage: python -m hf_zeropp.run [-m] SCRIPT [ARGUMENTS]"


def main(arguments: list[str] | None = None) -> None:
    """Run the script or module that ``arguments`` begin with, by default those of the process.

    Raises:
        SystemExit: there is no script, or the settings are wrong.
        ValueError: the script has trained, and never under ZeRO++.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    is_module = arguments[:1] == ["-m"]
    target, *rest = arguments[is_module:] or [""]
    if not target:
        raise SystemExit(USAGE)
    try:
        put_in_force()
    except ValueError as error:
        raise SystemExit(f"hf_zeropp.run: {error}") from error
    sys.argv = [target, *rest]
    try:
        _run(target, is_module)
    except SystemExit as end:  # many scripts end with ``sys.exit(main())``
        if end.code in (None, 0):
            check_use()
        raise
    check_use()


def _run(target: str, is_module: bool) -> None:
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        # ``python script.py`` finds modules beside the script, and ``python -m`` those of the working directory.
        if not getattr(sys.flags, "safe_path", False):  # under ``python -P`` no folder of a script is on the path
            sys.path[0] = os.path.dirname(os.path.realpath(target))
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main()
