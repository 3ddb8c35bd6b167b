"""A trial of a chat template, without a model."""

from __future__ import annotations

from datetime import datetime


def template_renders(template: str) -> bool:
    """Tell whether one user message renders, in a sandbox like that of llama-cpp-python."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        text = environment.from_string(template).render(
            messages=[{"role": "user", "content": "Hello"}],
            add_generation_prompt=True,
            bos_token="",
            eos_token="",
        )
    except Exception:  # a template can fail in any way that Python can
        return False
    return "Hello" in text
