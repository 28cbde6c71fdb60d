"""Text, tokens and chat prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_samples import small_tokenizer, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.engine.build import build
from kvtool.engine.tokenizer import Tokenizer
from kvtool.errors import EngineRefused, RequestRefused

KNOWN = {
    "Hello world": [19556, 905],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "<|im_start|>user\nhi<|im_end|>": [1, 4093, 198, 6004, 2],
}
"""As HuggingFaceTB/SmolLM2-135M-Instruct's own tokenizer.json encodes them."""


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_engine: Path) -> Tokenizer:
    return Tokenizer(smollm2_engine)


@pytest.mark.parametrize("text", KNOWN)
def test_known_encodings(smollm2_tokenizer: Tokenizer, text: str) -> None:
    assert smollm2_tokenizer.encode(text) == KNOWN[text]


def test_digits_are_cut_one_by_one(smollm2_tokenizer: Tokenizer) -> None:
    """The `smollm` pre-tokenizer; under GPT-2's, 2024 would be merged."""
    ids = smollm2_tokenizer.encode("in 2024")
    assert [smollm2_tokenizer.decode([i]) for i in ids] == ["in", " ", "2", "0", "2", "4"]


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(
        alphabet=st.characters(exclude_categories=["Cs", "Cn", "Co", "Cc"]) | st.sampled_from("\t\n\r"), max_size=60
    )
)
def test_text_comes_back_as_it_was(smollm2_tokenizer: Tokenizer, text: str) -> None:
    """All assigned characters. (The checkpoint's vocabulary lacks six control characters and unassigned planes.)"""
    assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text), keep_special=True) == text


def test_special_tokens_are_left_out_unless_asked_for(smollm2_tokenizer: Tokenizer) -> None:
    assert smollm2_tokenizer.decode([19556, 2]) == "Hello"
    assert smollm2_tokenizer.decode([19556, 2], keep_special=True) == "Hello<|im_end|>"


def test_half_a_character_shows_as_replacement(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("🙂")
    assert len(ids) > 1 and smollm2_tokenizer.decode(ids[:1]).endswith("\ufffd")


def test_chat_follows_the_checkpoints_template(smollm2_tokenizer: Tokenizer) -> None:
    assert smollm2_tokenizer.has_chat_template
    text = smollm2_tokenizer.chat([{"role": "system", "content": " s "}, {"role": "user", "content": "u\n"}])
    assert text == "<|im_start|>system\n s <|im_end|>\n<|im_start|>user\nu\n<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("messages", "words"),
    [([], "at least one"), ([{"role": "user"}], r"messages\[0\]: wanted"), (["hi"], r"messages\[0\]: wanted")],
)
def test_messages_of_another_form_are_refused(smollm2_tokenizer: Tokenizer, messages: list, words: str) -> None:
    with pytest.raises(RequestRefused, match=words):
        smollm2_tokenizer.chat(messages)


def _engine(tmp_path: Path, template: str | None, tokenizer: dict | None = None) -> Path:
    folder = write_checkpoint(tmp_path / "m", "LlamaForCausalLM")
    settings_ = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    if template is not None:
        settings_["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    if tokenizer:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return build(folder, tmp_path / "out").directory


def test_leading_bos_is_never_doubled(tmp_path: Path) -> None:
    """A template that writes BOS, and a tokenizer that adds it."""
    tokenizer = small_tokenizer() | {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        }
    }
    made = Tokenizer(_engine(tmp_path, "{{ bos_token }} {{ messages[0]['content'] }}", tokenizer))
    assert made.encode("w5 w6") == [0, 5, 6]
    assert made.encode(made.chat([{"role": "user", "content": "w5 w6"}])) == [0, 5, 6]


def test_template_that_refuses_is_the_requests_fault(tmp_path: Path) -> None:
    made = Tokenizer(_engine(tmp_path, "{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(RequestRefused, match="the chat template refuses these messages: roles must alternate"):
        made.chat([{"role": "user", "content": "hi"}])


def test_template_runs_in_a_sandbox(tmp_path: Path) -> None:
    made = Tokenizer(_engine(tmp_path, "{{ messages.__class__.__mro__ }}"))
    with pytest.raises(RequestRefused, match="refuses"):
        made.chat([{"role": "user", "content": "hi"}])


def test_template_that_is_no_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineRefused, match="chat template cannot be read"):
        Tokenizer(_engine(tmp_path, "{% for %}"))


def test_engine_without_a_template_says_so(tmp_path: Path) -> None:
    made = Tokenizer(_engine(tmp_path, None))
    assert not made.has_chat_template
    with pytest.raises(RequestRefused, match="no chat template"):
        made.chat([{"role": "user", "content": "hi"}])
