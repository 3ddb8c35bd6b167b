"""`qdraft serve`: an OpenAI-compatible server for a pair, or for several."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

from qdraft.cli.opening import describe_load, describe_pair, find_named_entry
from qdraft.cli.options.devices import DeviceOptions
from qdraft.cli.options.drafting import DraftingOptions
from qdraft.cli.options.group import Without, option_names, takes_options, with_settings
from qdraft.cli.options.models import ModelOptions
from qdraft.cli.options.output import ServerOutputOptions
from qdraft.cli.options.sampling import SamplingOptions
from qdraft.cli.options.serving import ServerOptions
from qdraft.cli.options.template import ChatTemplateOptions
from qdraft.cli.pair_command import settings_of
from qdraft.cli.run import refuse_combinations
from qdraft.errors import UsageError
from qdraft.llama.spec import PairSpec
from qdraft.pairs.registry import load as load_registry
from qdraft.render.progress import ProgressBars
from qdraft.session.pair import Pair

if TYPE_CHECKING:
    from qdraft.serve.gate import Rules
    from qdraft.serve.models import Defaults, Offer

log = logging.getLogger(__name__)


@takes_options
def serve(  # noqa: PLR0913 (one group each)
    models: ModelOptions,
    server: ServerOptions,
    sampling: SamplingOptions,
    drafting: DraftingOptions,
    devices: DeviceOptions,
    template: Annotated[ChatTemplateOptions, Without("hide_reasoning")],
    output: ServerOutputOptions,
) -> None:
    """Serve a pair to programs that speak OpenAI's API, until Ctrl-C.

    Requests wait for each other in order. A client that leaves ends its text. The next turn of a
    conversation reads only what is new. A chat page is at /.

    Sampling options are the defaults of requests. The server accepts connections from this machine
    only, unless --host names another address, which needs a key.
    """
    _require_packages()
    from qdraft.serve.models import Models
    from qdraft.serve.server import Settings
    from qdraft.serve.server import serve as run_server

    drafting.params(seed=sampling.seed)
    sampling.params()  # raises before anything is loaded
    refuse_combinations(models, drafting, devices)
    output.set_log_levels()
    devices.engines()
    settings = Settings(
        server.host,
        server.port,
        _rules(server),
        n_queue=server.queue,
        ping_s=max(0.0, server.sse_ping_interval),
        with_page=not server.no_page,
    )
    load = describe_load()
    with ProgressBars(quiet=output.quiet) as bars:
        offers = [
            _Offered(name, each, sampling, drafting, devices, template, bars).offer()
            for name, each in _named_models(models, server)
        ]
        if load:
            log.warning("%s: timings will be unreliable", load)
        run_server(Models(offers, server.keep), settings, bars.report)


def _named_models(
    models: ModelOptions, server: ServerOptions
) -> Iterator[tuple[str, ModelOptions]]:
    """Give each pair to serve, with its name for clients. Raises UsageError."""
    if server.pairs is None:
        entry = find_named_entry(models)
        name = entry.name if entry else models.target.stem if models.target else ""
        yield server.alias or name, models
        return
    if option := models.first_given("target", "draft", "pair", "hf_repo", "hf_repo_draft"):
        raise UsageError(f"--pairs cannot be combined with {option}")
    registry = load_registry(models.models_file)
    names = [name.strip() for name in server.pairs.split(",") if name.strip()]
    if names == ["all"]:
        names = sorted(registry.entries, key=lambda name: (name != registry.default, name))
    if not names:
        raise UsageError("--pairs names no pair", hint="list them with qdraft models list")
    for name in dict.fromkeys(names):
        yield registry.find(name).name, replace(models, pair=name)


@dataclass(frozen=True)
class _Offered:
    """A pair with the options of the command; its entry in models.yaml sets the others."""

    name: str
    models: ModelOptions
    sampling: SamplingOptions
    drafting: DraftingOptions
    devices: DeviceOptions
    template: ChatTemplateOptions
    bars: ProgressBars

    def offer(self) -> Offer:
        from qdraft.serve.models import Offer

        own = self._with_entry() if self.models.pair else self
        return Offer(self.name, own._describe, own._defaults)

    def _with_entry(self) -> _Offered:
        """Return the pair with the settings of its entry; one pair alone has them already."""
        entry = load_registry(self.models.models_file).find(self.models.pair)
        groups = (self.drafting, self.devices)
        given = {
            option.removeprefix("--")
            for group in groups
            for name, option in option_names(type(group)).items()
            if name in group.given
        }
        settings = settings_of(
            entry, self.drafting.drafter, self.models.no_draft, given.__contains__
        )
        return replace(
            self,
            drafting=with_settings(self.drafting, settings),
            devices=with_settings(self.devices, settings),
        )

    def _describe(self) -> PairSpec:
        """Say what to load, and build what is not built yet."""
        keep_draft = self.drafting.kind.requires_draft
        spec = describe_pair(
            self.models, self.devices, self.bars, self.drafting, keep_draft=keep_draft
        )
        text = self.template.template_text()
        return spec if text is None else replace(spec, template=text)

    def _defaults(self, pair: Pair) -> Defaults:
        """Say how the loaded pair writes."""
        from qdraft.serve.models import Defaults

        params = self.drafting.params(seed=self.sampling.seed)
        if not self.models.no_draft:
            params = pair.choose_drafter(params)
        return Defaults(
            self.sampling.params(pair.recommended.values),
            params,
            self.template.for_model(pair.vocab),
            self.template.splits,
        )


def _rules(server: ServerOptions) -> Rules:
    """Return who may use the server. Raises UsageError without a key beyond this machine."""
    from qdraft.serve.gate import LOOPBACK, Rules

    keys = server.read_keys()
    on_loopback = _is_loopback(server.host)
    if not on_loopback and not keys and not server.no_api_key:
        raise UsageError(
            f"--host {server.host} lets other machines use the server, which needs --api-key",
            hint="give a key, or --no-api-key if everyone in that network may use the server",
        )
    hosts = None
    if on_loopback or server.allow_host:
        own = [] if on_loopback else [server.host.lower()]
        hosts = (*LOOPBACK, *own, *(host.lower() for host in server.allow_host or ()))
    return Rules(keys, hosts, server.origins())


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _require_packages() -> None:
    """Raise UsageError unless the extra is installed."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"qdraft serve needs {' and '.join(missing)}",
            hint="install the extra with pip install 'qdraft[serve]'",
        )
