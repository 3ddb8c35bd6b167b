"""llama.cpp's options: which of qdraft's they are, which are not needed, and which are missing.

Read from ``common/arg.cpp`` of the llama.cpp that llama-cpp-python has, with some older names that
model cards and guides still use. An option that a command has itself is not looked up here.
"""

from __future__ import annotations

from dataclasses import dataclass

# By qdraft's option.
_SAME = {
    "--n-predict": "--predict",
    "--system": "--system-prompt",
    "--stop": "-r --reverse-prompt",
    "--raw": "-no-cnv --no-conversation",
    "--verbose": "-v --log-verbose",
    "--color": "-co",
    "--special": "-sp",
    "--gpu-layers": "--n-gpu-layers",
    "--gpu-layers-draft": "--n-gpu-layers-draft --spec-draft-ngl",
    "--model-draft": "--spec-draft-model",
    "--lora": "--lora-scaled",
    "--hf-repo-draft": "--spec-draft-hf",
    "--device-draft": "--spec-draft-device",
    "--override-tensor-draft": "--spec-draft-override-tensor",
    "--cpu-moe-draft": "--spec-draft-cpu-moe",
    "--cache-type-k-draft": "--spec-draft-type-k",
    "--cache-type-v-draft": "--spec-draft-type-v",
    "--n-draft": "--draft --draft-n --draft-max --spec-draft-n-max",
    "--p-min": "--draft-p-min --spec-draft-p-min",
    "--drafter": "--spec-type",
    "--json-schema": "-jf --json-schema-file",
}

# By the reason; ``=`` ends an option that takes a value.
_NOT_NEEDED = {
    "qdraft renders the model's own template with Jinja": "--jinja",
    "`qdraft run` writes one answer": "-st --single-turn --reasoning-preserve "
    "--no-reasoning-preserve --prefill-assistant --no-prefill-assistant --no-skip-chat-parsing",
    "qdraft prints the text alone": "--no-display-prompt --simple-io",
    "the summary shows the times": "--perf --no-perf --show-timings",
    "llama.cpp's log is off unless `--verbose` is given": "--log-disable --log-colors= "
    "--log-prefix --no-log-prefix --log-timestamps --no-log-timestamps --no-log-jsonl",
    "it is the default": "-e --escape -kvo --kv-offload --op-offload",
    "qdraft warms the models up while it loads them": "--warmup --no-warmup",
    "qdraft finds out whether repacked weights are safe": "--repack -nr --no-repack",
    "the text ends when the context is full": "--no-context-shift --keep= -dt= --defrag-thold=",
    "qdraft always keeps the full cache": "--swa-full",
    "qdraft places layers as `qdraft plan` shows": "-fit= --fit= -fitc= --fit-ctx=",
    "qdraft drafts as many tokens as pay off": "--spec-default --draft-min= --draft-n-min= "
    "--spec-draft-n-min= --draft-p-split= --spec-draft-p-split= -ps= --p-split=",
    "the drafter `ngram` sets its own lengths": "--spec-ngram-mod-n-min= --spec-ngram-mod-n-max= "
    "--spec-ngram-mod-n-match= --spec-ngram-simple-size-n= --spec-ngram-simple-size-m= "
    "--spec-ngram-simple-min-hits= --spec-ngram-map-k-size-n= --spec-ngram-map-k-size-m= "
    "--spec-ngram-map-k-min-hits= --spec-ngram-map-k4v-size-n= --spec-ngram-map-k4v-size-m= "
    "--spec-ngram-map-k4v-min-hits= --spec-ngram-size-n= --spec-ngram-size-m= "
    "--spec-ngram-min-hits=",
    "qdraft samples on the CPU": "-bs --backend-sampling --spec-draft-backend-sampling "
    "--no-spec-draft-backend-sampling",
    "a sampler that is off has no other settings": "--mirostat-lr= --mirostat-ent= "
    "--adaptive-decay=",
    "one text has one slot": "-cb --cont-batching -nocb --no-cont-batching -kvu --kv-unified "
    "-no-kvu --no-kv-unified --cache-prompt --no-cache-prompt --cache-reuse= -ctxcp= "
    "--ctx-checkpoints= --swa-checkpoints= -cms= --checkpoint-min-step= -cram= --cache-ram= "
    "--cache-idle-slots --no-cache-idle-slots --slots --no-slots -sps= --slot-prompt-similarity=",
    "qdraft reads text alone": "--no-mmproj --no-mmproj-auto --mmproj-auto --mmproj-offload "
    "--no-mmproj-offload --image-min-tokens= --image-max-tokens= --mtmd-batch-max-tokens= "
    "--video-fps= --video-timestamp-interval= --video-ffmpeg-dir=",
}

# By what to use instead. A value after ``=`` is one that asks for nothing.
_MISSING = {
    "use qdraft chat": "-cnv --conversation -i "
    "--interactive -if --interactive-first -mli --multiline-input -ins --instruct -cml --chatml",
    "write it into the prompt": "--in-prefix= --in-suffix= --in-prefix-bos",
    'use -sys "$(cat FILE)"': "-sysf= --system-prompt-file=",
    "use --file": "-bf= --binary-file=",
    "qdraft prints the text alone; --json has every token": "--display-prompt --verbose-prompt "
    "-ptc= --print-token-count=",
    "use > FILE": "-o= --output= --output-file=",
    "use --temp, --top-p or --min-p: its state goes by the probabilities of earlier tokens, which "
    "target and draft compute differently": "--mirostat=0 --adaptive-target=-1",
    "use --temp, --top-k, --top-p, --min-p or --typical-p": "--tfs=1",
    "the order is that of llama.cpp's default, so switch steps off one by one": "--samplers="
    "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature --sampler-seq=edskypmxt "
    "--sampling-seq=edskypmxt",
    "qdraft takes it from the file, so leave it out": "--rope-scaling= --rope-scale= "
    "--rope-freq-base= --rope-freq-scale= --yarn-orig-ctx= --yarn-ext-factor= --yarn-attn-factor= "
    "--yarn-beta-slow= --yarn-beta-fast= -gan=1 --grp-attn-n=1 -gaw= --grp-attn-w= -gqa= "
    "--override-kv=",
    "use --raw to leave the template out": "--no-jinja",
    "use --chat-template-file": "--chat-template=",
    "use --reasoning-format none": "--skip-chat-parsing",
    'use --chat-template-kwargs \'{"reasoning_effort": "low"}\'': "--reasoning-effort=default",
    "use --reasoning off to switch reasoning off": "--reasoning-budget=-1 "
    "--reasoning-budget-message=",
    "use --lora alone, which applies the adapter": "--lora-init-without-apply",
    "qdraft runs models as they are, so leave it out": "--control-vector= "
    "--control-vector-scaled= --control-vector-layer-range=",
    "qdraft reads text alone, so leave it out": "-mm= --mmproj= -mmu= --mmproj-url= -mmdev= "
    "--mmproj-device= --image= --audio= --video= --media-path=",
    "use -hf OWNER/NAME:TYPE, or download the file and use --model": "-mu= --model-url= -dr= "
    "--docker-repo= --embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default "
    "--fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default "
    "--gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default "
    "--vision-gemma-12b-default",
    "log in with hf auth login, or set HF_TOKEN": "-hft= --hf-token=",
    "set HF_HUB_OFFLINE=1": "--offline",
    "use qdraft models scan": "-cl --cache-list",
    "use qdraft devices": "--list-devices",
    "use qdraft --version": "--version",
    "use qdraft --help": "--usage --completion-bash",
    "use --mlock or --no-mmap": "-lm=auto|mmap --load-mode=auto|mmap",
    "qdraft maps files into memory, so leave it out": "-dio --direct-io -ndio --no-direct-io "
    "-lzm=auto --lazy-mode=auto --check-tensors --no-host",
    "use numactl": "--numa=",
    "use taskset": "-C= --cpu-mask= -Cr= --cpu-range= --cpu-strict=0 -Cb= --cpu-mask-batch= -Crb= "
    "--cpu-range-batch= --cpu-strict-batch=0 -Cd= --spec-draft-cpu-mask= --cpu-mask-draft= -Crd= "
    "--spec-draft-cpu-range= --cpu-range-draft= --spec-draft-cpu-strict=0 --cpu-strict-draft=0 "
    "-Cbd= --spec-draft-cpu-mask-batch= --cpu-mask-batch-draft= -Crbd= "
    "--spec-draft-cpu-range-batch= --cpu-range-batch-draft= --spec-draft-cpu-strict-batch=0 "
    "--cpu-strict-batch-draft=0",
    "use nice": "--prio=0 --prio-batch=0 --spec-draft-prio=0 --prio-draft=0 "
    "--spec-draft-prio-batch=0 --prio-batch-draft=0",
    "llama.cpp waits as it does by default, so leave it out": "--poll=50 --poll-batch= "
    "--spec-draft-poll= --poll-draft= --spec-draft-poll-batch= --poll-batch-draft=",
    "use --threads, which holds for target and draft": "-td= --threads-draft= "
    "--spec-draft-threads=",
    "use --threads-batch, which holds for target and draft": "-tbd= --threads-batch-draft= "
    "--spec-draft-threads-batch=",
    "use --cpu-moe, or --override-tensor for some layers": "-ncmoe= --n-cpu-moe=",
    "use --override-tensor": "-ncffn= --n-cpu-ffn=",
    "use --cpu-moe-draft, or --override-tensor-draft for some layers": "-ncmoed= "
    "--n-cpu-moe-draft= --spec-draft-n-cpu-moe= --spec-draft-ncmoe=",
    "use --gpu-layers": "--no-op-offload",
    "use qdraft plan --margin to see what fits": "-fitt= --fit-target=",
    "the text ends when the context is full; use a larger --ctx-size": "--context-shift",
    "use --drafter ngram, which reads the text itself": "-lcs= --lookup-cache-static= -lcd= "
    "--lookup-cache-dynamic=",
    "use qdraft replay --alpha": "--spec-synth-len= --spec-synth-rates=",
    "use --verbose": "-lv= --verbosity= --log-verbosity=",
    "use --verbose 2> FILE": "--log-file= --log-jsonl --log-prompts-dir=",
    "use --quiet": "--no-show-timings",
    "qdraft generates text and nothing else, so leave it out": "--embedding --embeddings --rerank "
    "--reranking --pooling= --embd-normalize= --spm-infill",
    "qdraft run writes one text": "-np=1|-1 --parallel=1|-1 --kv-unified-per-slot=",
    "use qdraft serve": "--host= --port= --cors-origins= --ui --webui --api-key= --api-key-file= "
    "--sse-ping-interval= --metrics --props -a= --alias=",
    "qdraft serve has no such option, so leave it out": "--server-base= --reuse-port --path= "
    "--cors-methods= --cors-headers= --cors-credentials --no-cors-credentials --api-prefix= "
    "--ui-config= --webui-config= --ui-config-file= --webui-config-file= --ui-mcp-proxy "
    "--webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy --tools= --tools-runtime= "
    "--mcp-servers-config= --mcp-servers-json= -ag --agent -no-ag --no-agent --ssl-key-file= "
    "--ssl-cert-file= -to= --timeout= --threads-http= --slot-save-path= --sleep-idle-seconds= "
    "--tags=",
    "use qdraft serve --no-page": "--no-ui --no-webui",
    "use qdraft serve --pairs": "--models-dir= --models-preset= --models-max= --models-autoload "
    "--no-models-autoload",
}


@dataclass(frozen=True, slots=True)
class Spelling:
    """One option of llama.cpp; one of ``option``, ``reason`` and ``advice`` says what it is here.

    ``option`` is qdraft's own, ``reason`` says why it is not needed, ``advice`` what to use instead
    of an option that is missing. Values of ``off`` ask for nothing.
    """

    option: str = ""
    reason: str = ""
    advice: str = ""
    takes_value: bool = False
    off: tuple[str, ...] = ()

    def is_off(self, value: str) -> bool:
        """Tell whether this value asks for nothing, for example 0.0 if 0 does."""
        return value in self.off or any(_is_same_number(value, each) for each in self.off)


def _is_same_number(first: str, second: str) -> bool:
    try:
        return float(first) == float(second)
    except ValueError:
        return False


def _read_tables() -> dict[str, Spelling]:
    known = {
        name: Spelling(option=option) for option, names in _SAME.items() for name in names.split()
    }
    for table, what in ((_NOT_NEEDED, "reason"), (_MISSING, "advice")):
        for words, names in table.items():
            for each in names.split():
                name, takes_value, off = each.partition("=")
                values = tuple(filter(None, off.split("|")))
                known[name] = Spelling(**{what: words}, takes_value=bool(takes_value), off=values)
    return known


SPELLINGS = _read_tables()


def spelling_tables() -> tuple[dict[str, list[str]], dict[str, list[str]], dict[str, list[str]]]:
    """Return the names by qdraft's option, by the reason, and by what to use instead."""
    tables: tuple[dict[str, list[str]], ...] = ({}, {}, {})
    for name, spelling in SPELLINGS.items():
        texts = (spelling.option, spelling.reason, spelling.advice)
        place = next(i for i, text in enumerate(texts) if text)
        tables[place].setdefault(texts[place], []).append(name)
    return tables[0], tables[1], tables[2]


# Other words for a value, by qdraft's option.
_ON, _OFF = ("on", "enabled", "true", "1"), ("off", "disabled", "false", "0")
_SWITCH = {**dict.fromkeys(_ON, "on"), **dict.fromkeys(_OFF, "off"), "auto": "auto", "-1": "auto"}
VALUES = {
    "--flash-attn": _SWITCH,
    "--color": _SWITCH,
    "--reasoning": _SWITCH,
    "--n-predict": {"-2": "-1"},  # until the context is full, which is where -1 ends too
    "--threads": {"-1": "0"},
    "--threads-batch": {"-1": "0"},
}


def drafter_of(spec_type: str) -> str | None:
    """Return the drafter for llama.cpp's list of ways to draft: "" for none, None if unknown."""
    kinds = set(spec_type.split(","))
    if kinds == {"none"}:
        return ""
    has_model = "draft-simple" in kinds
    grams = {kind for kind in kinds if kind.startswith("ngram-")}
    if kinds - grams - {"draft-simple"}:
        return None
    return "hybrid" if has_model and grams else "model" if has_model else "ngram"
