"""The command line that places layers as a plan does."""

from __future__ import annotations

from qdraft.llama.placed import CPU
from qdraft.placement.plan import Plan


def run_options(plan: Plan) -> str:
    """Return the options of ``qdraft run`` that place layers as ``plan`` does.

    The result is empty if no options can do that: the plan uses the CPU alone, devices that are not
    here, or several devices for the draft.
    """
    devices = [use for use in plan.uses if use.device != CPU]
    target, draft = plan.models.target.params, plan.models.draft
    if not devices or plan.estimated or (draft and len(draft.params.devices) > 1):
        return ""
    n_target = sum(use.target.n_layers for use in devices)
    n_draft = sum(use.draft.n_layers for use in devices)
    servers = dict.fromkeys(use.description for use in devices if use.remote)
    options = [f"--rpc {','.join(servers)}"] if servers else []
    if n_target:
        options.append(f"-ngl {n_target} -dev {','.join(target.devices)}")
        if target.tensor_split:
            options.append(f"-ts {','.join(f'{n:g}' for n in target.tensor_split)}")
    else:
        options.append("-dev none")
    if draft is None:
        options.append("--no-draft")
    else:
        options.append(f"-devd {draft.params.devices[0]}")
        options += [f"-ngld {n_draft}"] if n_draft else []
    return " ".join(options)
