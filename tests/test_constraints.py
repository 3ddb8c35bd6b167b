"""Constraints: the law of the constrained target, forced tokens, and mistakes in words."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from fakes import GREEDY, PLAIN, PROMPT, distance, normal, run, tokens_of
from invoke import qdraft

from qdraft.constraints.grammar import compile_grammar
from qdraft.constraints.matcher import Begin, Mask, TextConstraint, from_the_start
from qdraft.constraints.vocabulary import ConstraintVocabulary
from qdraft.decoding.constraint import FORCED, Constraint, ConstraintSpec
from qdraft.decoding.drafters.forced import ForcedDrafter
from qdraft.decoding.drafters.hybrid import HybridDrafter
from qdraft.decoding.drafters.model import ModelDrafter
from qdraft.decoding.drafters.ngram import NgramDrafter
from qdraft.decoding.drafters.protocol import Drafter
from qdraft.decoding.loop import TokenReader
from qdraft.decoding.policy.gate import CostGate, CountingGate
from qdraft.decoding.policy.learned import Learned
from qdraft.decoding.policy.model import Costs
from qdraft.decoding.records import FinishReason, Round, SamplingParams
from qdraft.decoding.rng import Rng, SeededRng
from qdraft.decoding.sampling import Sampler
from qdraft.decoding.summary import summarize
from qdraft.errors import ConstraintError, ParameterError, UsageError
from qdraft.session.check import check
from qdraft.session.reasoning import EndOfReasoning, Marks
from qdraft.session.text import TextReader
from qdraft.testing import FakeSequence, FakeVocab, ScriptedDrafter, enumerate_law

A, B, AB, C, END = range(5)
LETTERS = FakeVocab([b"a", b"b", b"ab", b"c", b"<end>"], end=[END])
# One to three letters, then perhaps a c: "ab" is one token or two, and the end comes at any place.
SMALL = ConstraintSpec("grammar", 'root ::= [ab]{1,3} "c"?')
BYTES = FakeVocab(
    [*(bytes([i]) for i in range(256)), b"<end>", b"{{", b'{"', b'": "', b"name", b"</think>"],
    end=[256],
    control=[261],
)
THINK_END = 261


def constrain(
    spec: ConstraintSpec, vocab: FakeVocab, begin: Begin = from_the_start
) -> TextConstraint:
    return TextConstraint(spec, ConstraintVocabulary(vocab), len(PROMPT), begin)


def logits(seed: int, blend: float = 0.0):  # type: ignore[no-untyped-def]
    def row(tokens: tuple[int, ...]) -> np.ndarray:
        n, key = LETTERS.n_tokens, (*tokens[-2:], len(tokens) % 3)
        return (1 - blend) * normal(n, seed, *key) + blend * normal(n, seed + 1, *key)

    return row


def target() -> FakeSequence:
    return FakeSequence(logits(7), LETTERS)


def drafter() -> ModelDrafter:
    return ModelDrafter(FakeSequence(logits(7, blend=0.4), LETTERS), LETTERS.n_tokens)


def alone(constraint: Constraint, n_predict: int, params: SamplingParams = PLAIN):  # type: ignore[no-untyped-def]
    """The law of the constrained target, by multiplying its distributions up to the end."""
    sampler, row = Sampler(params, LETTERS.n_tokens, constraint=constraint), logits(7)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(n_predict):
        longer = {}
        for text, weight in law.items():
            if text[-1:] == (END,):
                longer[text] = weight
                continue
            context = (*PROMPT, *text)
            p = sampler.distribution(np.array(row(context), dtype=np.float32), context)
            probs = p.dense(LETTERS.n_tokens)
            longer |= {(*text, t): weight * x for t, x in enumerate(probs) if x > 0}
        law = longer
    return law


def law_of(
    constraint: Constraint,
    draft: Drafter | None = None,
    *,
    block: bool = False,
    n_predict: int = 4,
    params: SamplingParams = PLAIN,
) -> dict[tuple[int, ...], float]:
    def program(rng: Rng) -> tuple[int, ...]:
        rounds = run(
            target(),
            draft or drafter(),
            params=params,
            n_predict=n_predict,
            n_draft=2,
            rng=rng,
            block=block,
            reader=TokenReader(LETTERS.is_end),
            constraint=constraint,
        )
        return tuple(tokens_of(list(rounds)))

    return enumerate_law(program)


PENALIZED = SamplingParams(
    temperature=0.7, top_k=3, top_p=0.95, min_p=0.02, repeat_penalty=1.3, logit_bias={C: 0.8}
)


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
@pytest.mark.parametrize("params", [PLAIN, PENALIZED], ids=["plain", "chain"])
def test_law_is_that_of_the_constrained_target(block: bool, params: SamplingParams) -> None:
    law = law_of(constrain(SMALL, LETTERS), block=block, params=params)
    assert sum(law.values()) == pytest.approx(1)
    assert distance(law, alone(constrain(SMALL, LETTERS), 4, params)) < 1e-12
    texts = {"".join(LETTERS.piece(t).decode() for t in text) for text in law}
    assert {"a", "bab", "abc"} <= texts


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
def test_law_with_forced_tokens_and_repetitions(block: bool) -> None:
    spec = ConstraintSpec("grammar", 'root ::= [ab] "ba" [ab] "c"')
    forced = HybridDrafter(NgramDrafter(), ForcedDrafter())
    for draft in (None, forced):
        law = law_of(constrain(spec, LETTERS), draft, block=block, n_predict=6)
        assert distance(law, alone(constrain(spec, LETTERS), 6)) < 1e-12
        assert len(law) > 3


class Fault:
    """A constraint with one mistake; the others of its answers are right."""

    def __init__(self, inner: TextConstraint) -> None:
        self.inner = inner

    def prepare(self, context: Sequence[int], drafted: Sequence[int]) -> None:
        self.inner.prepare(context, drafted)

    def allowed(self, context: Sequence[int], drafted: Sequence[int] = ()) -> Mask | None:
        return self.inner.allowed(context, drafted)

    def forced(self, context: Sequence[int], drafted: Sequence[int] = ()) -> Sequence[int]:
        return ()

    def n_allowed(self, context: Sequence[int], drafted: Sequence[int]) -> int:
        return len(drafted)


class WrongPlace(Fault):
    """The mask of the place before, within a block."""

    def allowed(self, context: Sequence[int], drafted: Sequence[int] = ()) -> Mask | None:
        return self.inner.allowed(context, drafted[:-1])


class RejectedTokens(Fault):
    """The state moves by all tokens of a block, as if none were ever rejected."""

    believed: tuple[int, ...] = ()

    def read(self, context: Sequence[int]) -> tuple[int, ...]:
        if len(context) <= len(PROMPT):
            self.believed = ()
        return (*self.believed[: len(context)], *context[len(self.believed) :])

    def prepare(self, context: Sequence[int], drafted: Sequence[int]) -> None:
        self.believed = (*self.read(context), *drafted)

    def allowed(self, context: Sequence[int], drafted: Sequence[int] = ()) -> Mask | None:
        return self.inner.allowed(self.read(context), drafted)


class DraftOnly(Fault):
    """The mask on q, and none on p."""

    verified = 0

    def prepare(self, context: Sequence[int], drafted: Sequence[int]) -> None:
        self.verified = len(context) if len(context) > len(PROMPT) else 0

    def allowed(self, context: Sequence[int], drafted: Sequence[int] = ()) -> Mask | None:
        return None if len(context) == self.verified else self.inner.allowed(context, drafted)


class TargetOnly(Fault):
    """No fault: q may be anything, as long as the mask is on p."""

    verified = -1

    def prepare(self, context: Sequence[int], drafted: Sequence[int]) -> None:
        self.verified = len(context)

    def allowed(self, context: Sequence[int], drafted: Sequence[int] = ()) -> Mask | None:
        return self.inner.allowed(context, drafted) if len(context) == self.verified else None


@pytest.mark.parametrize("fault", [WrongPlace, RejectedTokens, DraftOnly])
def test_the_enumeration_finds_planted_faults(fault: type[Fault]) -> None:
    right = alone(constrain(SMALL, LETTERS), 4)
    try:
        law = law_of(fault(constrain(SMALL, LETTERS)))
    except ConstraintError:  # the state has left the text so far that the text has no place in it
        return
    assert distance(law, right) > 0.01


def test_an_unmasked_draft_keeps_the_law() -> None:
    law = law_of(TargetOnly(constrain(SMALL, LETTERS)))
    assert distance(law, alone(constrain(SMALL, LETTERS), 4)) < 1e-12


def ids(text: str) -> list[int]:
    return BYTES.tokenize(text)


def bits(constraint: TextConstraint, drafted: Sequence[int]) -> list[object]:
    rows = [constraint.allowed(PROMPT, drafted[:i]) for i in range(len(drafted) + 1)]
    return [None if row is None else row.tolist() for row in rows]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer", "maximum": 20}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
OF_SCHEMA = ConstraintSpec("json_schema", json.dumps(SCHEMA))
ANSWER = '{"name": "x", "n": 12}'


def test_masks_of_a_block_are_those_of_single_looks_and_of_a_fresh_matcher() -> None:
    block = [*ids(ANSWER), 256, 5]
    looked, single = constrain(OF_SCHEMA, BYTES), constrain(OF_SCHEMA, BYTES)
    looked.prepare(PROMPT, block)
    assert bits(looked, block) == bits(single, block)
    moved = constrain(OF_SCHEMA, BYTES)
    for i in range(len(block) - 1):
        mask, seen = moved.allowed([*PROMPT, *block[:i]]), single.allowed(PROMPT, block[:i])
        assert mask is not None
        assert seen is not None
        assert np.array_equal(mask, seen)
        assert mask[block[i]]
    assert single.allowed(PROMPT, block) is None  # nothing is ruled out after the end


def test_looking_ahead_leaves_no_trace() -> None:
    constraint = constrain(OF_SCHEMA, BYTES)
    before = bits(constraint, ids(ANSWER))
    for wrong in ('{"name": "y", "n": 7}', '{"nope', ANSWER[:9] + "zzz"):
        constraint.prepare(PROMPT, [*ids(wrong), 256, 256])
        constraint.n_allowed(PROMPT, ids(wrong))
        constraint.forced(PROMPT, ids(wrong)[:3])
        constraint.allowed(PROMPT, ids(wrong))
    assert bits(constraint, ids(ANSWER)) == before


def test_a_text_read_once_more_gives_the_same_masks() -> None:
    """A check reads the whole text again, with the constraint that has followed it to its end."""
    constraint, tokens = constrain(OF_SCHEMA, BYTES), ids(ANSWER)
    masks = [constraint.allowed([*PROMPT, *tokens[:i]]) for i in range(len(tokens) + 1)]
    again = [constraint.allowed([*PROMPT, *tokens[:i]]) for i in range(len(tokens) + 1)]
    for mask, other in zip(masks, again, strict=True):
        assert mask is not None
        assert other is not None
        assert np.array_equal(mask, other)


def test_the_end_is_allowed_only_where_the_grammar_accepts() -> None:
    constraint = constrain(SMALL, LETTERS)
    ends = {
        text: constraint.allowed(PROMPT, text)[END]  # type: ignore[index]
        for text in [(), (A,), (AB,), (A, A, A), (A, C)]
    }
    assert ends == {(): False, (A,): True, (AB,): True, (A, A, A): True, (A, C): True}
    only = constraint.allowed(PROMPT, (A, C))
    assert only is not None
    assert only.sum() == 1


def follow(
    script: Sequence[int],
    vocab: FakeVocab,
    constraint: Constraint,
    *,
    n_draft: int = 8,
    drafts: Sequence[Sequence[int]] | None = None,
    stop: Sequence[str] = (),
) -> tuple[list[Round], str, FakeSequence]:
    """Run a target that wants to write ``script``, with drafts of what it wants, or of ``drafts``.

    The drafts begin after the first token.
    """

    def wanted(tokens: tuple[int, ...]) -> np.ndarray:
        row = np.zeros(vocab.n_tokens)
        n = len(tokens) - len(PROMPT)
        row[script[n] if n < len(script) else 0] = 9
        return row

    def offer(context: Sequence[int]) -> Sequence[int]:
        n = len(context) - len(PROMPT)
        return next(iter(drafts)) if drafts else script[n:]

    sequence = FakeSequence(wanted, vocab)
    reader = TextReader(vocab, stop)
    pieces: list[str] = []
    rounds = []
    for each in run(
        sequence,
        ScriptedDrafter(offer),
        n_draft=n_draft,
        reader=reader,
        constraint=constraint,
        n_predict=40,
    ):
        rounds.append(each)
        pieces += reader.pieces
    return rounds, "".join(pieces) + reader.flush(), sequence


def test_a_structure_that_ends_inside_a_block_ends_the_text() -> None:
    script = [*ids(ANSWER), 256, *ids("more")]
    rounds, text, sequence = follow(script, BYTES, constrain(OF_SCHEMA, BYTES), n_draft=40)
    assert text == ANSWER
    assert rounds[-1].finish_reason is FinishReason.END_OF_GENERATION
    assert rounds[-1].n_draft > rounds[-1].n_emitted  # the draft went on after the end
    assert sequence.n_past == len(PROMPT) + len(ids(ANSWER))


def after_the_mark(tokens: Sequence[int]) -> int | None:
    return tokens.index(THINK_END) + 1 if THINK_END in tokens else None


BRACES = ConstraintSpec("grammar", 'root ::= "{{" [ab]+ "}}"')


@pytest.mark.parametrize("n_draft", [0, 2, 3, 4, 12])
@pytest.mark.parametrize("is_one", [True, False], ids=["one token", "two tokens"])
def test_entry_after_the_reasoning_inside_a_block(n_draft: int, is_one: bool) -> None:
    """The braces are not written twice, wherever in a block the reasoning ends.

    https://github.com/vllm-project/vllm/issues/44993
    """
    pieces = [BYTES.piece(t, special=True) for t in range(BYTES.n_tokens)]
    if not is_one:
        pieces[257] = b"unused"
    vocab = FakeVocab(pieces, end=[256], control=[THINK_END])
    braces = [257] if is_one else [123, 123]
    script = [*vocab.tokenize("a{ no"), THINK_END, *braces, *vocab.tokenize("ab}}"), 256]
    rounds, text, _ = follow(
        script, vocab, constrain(BRACES, vocab, after_the_mark), n_draft=n_draft
    )
    assert text == "a{ no{{ab}}"
    assert tokens_of(rounds) == script


def test_the_end_of_the_reasoning_is_where_its_mark_is_complete() -> None:
    """The mark may be one token or several; draft tokens that are rejected leave no trace."""
    begin = EndOfReasoning(BYTES, Marks("<think>", "</think>"))
    assert begin([*ids("hm"), *b"</thi"]) is None
    assert begin([*ids("hm"), THINK_END, *ids("{{a")]) == 3
    assert begin([*ids("hm"), *b"</think>", *ids("{{a")]) == 10
    assert begin([*ids("hm"), *ids(" no")]) is None


def test_the_constraint_holds_from_the_first_token_after_the_reasoning() -> None:
    """The target would write something else; a draft of that is rejected."""
    script = [*ids("hm"), THINK_END, *ids("no json"), 256]
    constraint = constrain(BRACES, BYTES, after_the_mark)
    rounds, text, _ = follow(script, BYTES, constraint, n_draft=6)
    assert text.startswith("hm{{")
    assert set(text[4:]) <= set("ab}")
    assert any(r.n_accepted < r.n_draft for r in rounds)


def test_braces_are_one_token_or_two_if_the_grammar_does_not_force_them() -> None:
    constraint = constrain(ConstraintSpec("grammar", "root ::= [{a]{1,3}"), BYTES)
    first = constraint.allowed(PROMPT)
    assert first is not None
    assert set(np.flatnonzero(first)) == {ord("a"), ord("{"), 257}
    second = constraint.allowed(PROMPT, [257])
    assert second is not None
    assert set(np.flatnonzero(second)) == {ord("a"), ord("{"), 256}


def test_a_stop_string_inside_a_json_string_ends_the_text() -> None:
    script = [*ids('{"name": "xyz", "n": 1}'), 256]
    rounds, text, _ = follow(script, BYTES, constrain(OF_SCHEMA, BYTES), stop=["y"], n_draft=6)
    assert text == '{"name": "x'
    assert rounds[-1].finish_reason is FinishReason.STOP_STRING


def test_an_empty_set_of_tokens_is_an_error_in_words() -> None:
    constraint = constrain(ConstraintSpec("grammar", 'root ::= "a" "z"'), LETTERS)
    with pytest.raises(
        ConstraintError, match="no token of this model can follow the text under grammar"
    ):
        constraint.allowed(PROMPT, [A])
    banned = SamplingParams(temperature=0, logit_bias={A: -np.inf, B: -np.inf, AB: -np.inf})
    sampler = Sampler(banned, LETTERS.n_tokens, constraint=constrain(SMALL, LETTERS))
    with pytest.raises(ConstraintError, match="banned by a bias"):
        sampler.argmax(np.zeros(LETTERS.n_tokens, dtype=np.float32), PROMPT)


def test_an_empty_set_within_a_draft_leaves_the_tokens_before_it() -> None:
    """The text may go another way; the error comes if it gets there."""
    constraint = constrain(ConstraintSpec("grammar", 'root ::= "a" ("z" | "b" "z")'), LETTERS)
    rounds = run(target(), drafter(), constraint=constraint, n_draft=4)
    emitted: list[int] = []
    while b"".join(map(LETTERS.piece, emitted)) != b"ab":
        emitted += next(rounds).tokens
    with pytest.raises(ConstraintError):
        next(rounds)


def sources(drafter: Drafter, n_draft: int = 1) -> tuple[list[Round], str]:
    def wanted(tokens: tuple[int, ...]) -> np.ndarray:
        return normal(BYTES.n_tokens, 3, *tokens[-1:]) - 4 * (np.arange(BYTES.n_tokens) > 126)

    vocab = BYTES
    spec = {"type": "object", "properties": {"name": {"enum": ["alice", "bob"]}}}
    schema = {**spec, "required": ["name"], "additionalProperties": False}
    constraint = constrain(ConstraintSpec("json_schema", json.dumps(schema)), vocab)
    own = ModelDrafter(FakeSequence(wanted, vocab), vocab.n_tokens) if drafter is None else drafter
    rounds = list(
        run(
            FakeSequence(wanted, vocab),
            own,
            n_draft=n_draft,
            reader=TokenReader(vocab.is_end),
            constraint=constraint,
        )
    )
    return rounds, b"".join(map(vocab.piece, tokens_of(rounds))).decode()


def test_forced_tokens_are_drafts_without_a_model() -> None:
    rounds, text = sources(ForcedDrafter())
    assert text in ('{"name": "alice"}', '{"name": "bob"}')
    assert {r.source for r in rounds if r.n_draft} == {FORCED}
    assert all(r.n_accepted == r.n_draft == r.n_forced for r in rounds)
    assert not any(r.draft.n_rows for r in rounds)
    assert len(rounds) < len(tokens_of(rounds)) / 2
    assert set(summarize(rounds).sources) == {FORCED}


def test_forced_tokens_extend_a_models_draft_and_cost_no_row() -> None:
    rounds, _ = sources(None)  # type: ignore[arg-type]
    mixed = [r for r in rounds if r.source == "model" and r.n_forced]
    assert mixed
    assert max(r.n_draft for r in mixed) > 1
    assert all(r.n_draft - r.n_forced == r.draft.n_rows for r in rounds)
    by_source = summarize(rounds).sources
    assert by_source[FORCED]["n_accepted"] == by_source[FORCED]["n_tested"] > 0
    drafted = sum(each["n_drafted"] for each in by_source.values())
    assert drafted == sum(r.n_draft for r in rounds)


def test_a_plain_round_measures_the_target_without_forced_tokens() -> None:
    assert CountingGate(0).extend(5) == 0
    assert CountingGate(2).extend(5) == 5
    gate = CountingGate(1)
    assert gate.take("model", 1.0)
    assert gate.extend(3) == 3
    assert not gate.more("model")


def test_forced_tokens_are_verified_as_far_as_that_pays_off() -> None:
    learned = Learned()
    learned.costs.start(Costs({"model": 0.2}, {2: 1.05, 4: 1.1, 5: 5.0}, 0.1))
    gate = CostGate(learned, 8, n_to_come=99)
    assert gate.extend(4) == 3  # the fifth row costs as much as decoding it alone
    assert gate.extend(0) == 0


def test_repetitions_are_cut_at_the_first_token_that_is_not_allowed() -> None:
    constraint = constrain(ConstraintSpec("grammar", 'root ::= "a"{2} "b" "c"?'), LETTERS)
    sampler = Sampler(GREEDY, LETTERS.n_tokens, constraint=constraint)
    context = [B, A, A, C, *PROMPT[:0], B]  # the prompt has the length of PROMPT
    assert constraint.n_allowed(context[:3], [A, A, C]) == 2
    assert constraint.n_allowed(context[:3], [A, A, B, END, A]) == 4
    assert constraint.n_allowed(context[:3], [C]) == 0
    repeated = [A, A, A]  # before the text: as if it had just been written
    draft = NgramDrafter().draft(repeated, CountingGate(4), sampler, SeededRng(0))
    assert draft.tokens == (A, A, B)
    assert draft.forced == (2,)


def test_a_check_holds_under_a_constraint_and_finds_what_is_outside() -> None:
    constraint = constrain(SMALL, LETTERS)
    sampler = Sampler(PLAIN, LETTERS.n_tokens, constraint=constraint)
    rounds = list(
        run(
            target(),
            drafter(),
            params=PLAIN,
            reader=TokenReader(LETTERS.is_end),
            constraint=constraint,
        )
    )
    assert check(target(), PROMPT, rounds, sampler).same
    other = ConstraintSpec("regex", "b+c")
    free = Sampler(GREEDY, LETTERS.n_tokens, constraint=constrain(other, LETTERS))
    outside = list(run(target(), drafter(), n_predict=6))
    assert not check(target(), PROMPT, outside, free).same


GRAMMARS = [
    ('root ::= word ("s" | "x")\nword ::= [a-z]+', ["cats", "as"], ["s", "cat"]),
    ('root ::= a b\na ::= [a-z]+\nb ::= [a-z]+ "1"', ["ab1"], ["a1"]),
    ('root ::= "(" root ")" | [a-z]*', ["(a)", "((b))", ""], ["(", "(a"]),
    ('root ::= a | b | "(" root ")"\na ::= "if" [0-9]\nb ::= [a-z]* [A-Z]', ["ifA", "if1"], ["if"]),
    ('root ::= "\\x41\\u00e9\\n" [^"\\\\/]{2,3} . # c', ["Aé\nab\n"], ["Aé\na/\n"]),
    ('root ::= [a\\]\\[-]+ "ab"{2}', ["[-]abab"], ["[ab"]),
    ('root ::= ("a"\n | "b" # x\n)?', ["a", "b", ""], ["ab"]),
    ('root ::= e\ne ::= e "+" n | n\nn ::= [0-9]{1,}', ["1", "1+22"], ["1+"]),
]


@pytest.mark.parametrize(("grammar", "texts", "others"), GRAMMARS)
def test_a_grammar_accepts_what_it_accepts_in_llamacpp(
    grammar: str, texts: list[str], others: list[str]
) -> None:
    single = FakeVocab([bytes([i]) for i in range(256)] + [b"<end>"], end=[256])
    for text in texts:
        constraint = constrain(ConstraintSpec("grammar", grammar), single)
        assert constraint.n_allowed(PROMPT, [*text.encode(), 256]) == len(text.encode()) + 1, text
    for text in others:
        constraint = constrain(ConstraintSpec("grammar", grammar), single)
        assert constraint.n_allowed(PROMPT, [*text.encode(), 256]) <= len(text.encode()), text


MISTAKES = [
    ("json_schema", '{"type": }', "json_schema, line 1, column 10: expecting value"),
    ("json_schema", "3", "json_schema must be a JSON object or a boolean"),
    ("json_schema", '{"type": "strin"}', "json_schema, at the root: invalid type: strin"),
    (
        "json_schema",
        '{"$defs": {"d": {"enum": []}}, "properties": {"a": {"items": {"$ref": "#/$defs/d"}}}}',
        "json_schema, at /$defs/d: unsatisfiable schema: anyOf is empty",
    ),
    (
        "json_schema",
        '{"properties": {"a": {"anyOf": [{"type": "null"}, {"pattern": "[a"}]}}}',
        "json_schema, at /properties/a/anyOf/1: column 1: unclosed character class",
    ),
    (
        "json_schema",
        '{"properties": {"a": {"type": "array", "uniqueItems": true}}}',
        'json_schema, at /properties/a: unimplemented keys: ["uniqueItems"]',
    ),
    ("json_schema", '{"x-guidance": {}}', "json_schema has x-guidance, which qdraft sets itself"),
    ("regex", "a(b", "regex, column 2: unclosed group"),
    ("regex", "a(?=b)", "regex, column 2: look-around"),
    ("grammar", 'root = "a"', "grammar, line 1, column 6: ::= is missing after root"),
    ("grammar", 'root ::= a\na ::= "x', "grammar, line 2, column 7: a literal has no end"),
    ("grammar", "root ::= a", "grammar, line 1, column 10: the rule a is not defined"),
    ("grammar", "x ::= [a]", "grammar has no rule root"),
    ("grammar", "root ::= [a", "grammar, line 1, column 10: a class has no end"),
    ("grammar", 'root ::= "a"{3,2}', "grammar, line 1, column 13: the most repetitions are fewer"),
    ("grammar", "root ::= <think>", "grammar, line 1, column 10: qdraft does not know tokens"),
    ("grammar", 'root ::= ("a"', "grammar, line 1, column 10: the ( has no )"),
]


@pytest.mark.parametrize(("kind", "text", "message"), MISTAKES)
def test_a_mistake_is_one_line_with_its_place(kind: str, text: str, message: str) -> None:
    with pytest.raises(ParameterError) as caught:
        compile_grammar(ConstraintSpec(kind, text))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_whitespace_is_that_of_one_line() -> None:
    constraint = constrain(OF_SCHEMA, BYTES)
    for text, wrong in [
        ("{", " \n"),
        ('{"name":', "\n"),
        ('{"name": "x",', "\n\t"),
        (ANSWER, " \n"),
    ]:
        mask = constraint.allowed(PROMPT, list(text.encode()) if text != ANSWER else ids(text))
        assert mask is not None
        assert not any(mask[ord(c)] for c in wrong), text


def test_a_constraint_without_its_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match="needs the package llguidance") as caught:
        compile_grammar(ConstraintSpec("json_object"))
    assert "pip install 'qdraft[json]'" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--json-object", "--regex", "a"], "--regex cannot be combined with --json-object"),
        (["--json-object", "--ignore-eos"], "--ignore-eos cannot be combined with --json-object"),
        (["--json-schema", '{"type": 3'], "--json-schema, line 1, column 11"),
        (["--json-schema", "no.json"], "no.json"),
        (["--grammar", "root ::= x"], "--grammar, line 1, column 10: the rule x is not defined"),
        (["--regex", "("], "--regex, column 1: unclosed group"),
    ],
)
def test_options_that_cannot_be_are_errors_before_anything_is_loaded(
    args: list[str], message: str
) -> None:
    done = qdraft("run", "-m", "missing.gguf", "-p", "x", *args)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
