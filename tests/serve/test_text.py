"""Text as it grows: whole characters, stop strings, and the sum of the parts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.serve.text import TextStream


class Bytes:
    """A byte-level vocabulary: token i < 256 is that byte; above, longer pieces, some ending inside a character."""

    PIECES = (b"the ", b"END", b"<|", b"|>", "é".encode(), "😀".encode()[:2], "😀".encode()[2:], b"", b"ab", b"b\n")

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else self.PIECES[token - 256]

    def decode(self, ids):
        return b"".join(map(self.piece, ids)).decode("utf-8", errors="replace")


class Leading:
    """SentencePiece's habit: pieces carry their leading space, and decode drops the very first one."""

    PIECES = (" Hello", " world", "!", "", " a")

    def decode(self, ids):
        return "".join(self.PIECES[token] for token in ids).removeprefix(" ")


def run(tokens, stop=(), decoder=None):
    """-> the steps, and the text by the formula that a stateless reader uses."""
    decoder = decoder or Bytes()
    stream, steps = TextStream(decoder, stop), []
    for token in tokens:
        step = stream.push(token)
        if step is not None:
            steps.append(step)
            if step.stopped:
                break
    else:
        steps.append(stream.flush())
    text = ""
    for step in steps:
        grown = decoder.decode([*step.context, *step.tokens])[len(decoder.decode(step.context)) :]
        written = grown[: len(grown) - step.cut_chars]
        assert written == step.text
        text += written
    return steps, text


def reference(tokens, stop=(), decoder=None):
    """All at once: the first prefix of `tokens` that shows a stop string, cut where the first one begins."""
    decoder = decoder or Bytes()
    for count in range(1, len(tokens) + 1):
        text = decoder.decode(tokens[:count])
        found = [text.find(word) for word in stop if word in text]
        if found:
            return text[: min(found)]
    return decoder.decode(tokens)


TOKENS = st.lists(st.one_of(st.integers(0, 265), st.sampled_from(list("ENDthe <|>ab\né€😀".encode()))), max_size=40)
fixed = settings(derandomize=True, deadline=None, database=None)
STOPS = st.lists(st.sampled_from(["END", "<|>", "the end", "ab", "b", "\n\n", "é", "E", "a€b", "😀"]), max_size=3)


@fixed
@given(TOKENS, STOPS)
def test_the_parts_add_up_to_the_whole(tokens, stop):
    steps, text = run(tokens, stop)
    assert text == reference(tokens, stop)
    sent = [token for step in steps for token in step.tokens]
    assert sent == tokens[: len(sent)]
    assert steps[-1].stopped or sent == tokens


@fixed
@given(st.lists(st.integers(0, 4), max_size=12))
def test_a_leading_space_is_dropped_once(tokens):
    assert run(tokens, decoder=Leading())[1] == Leading().decode(tokens)


@fixed
@given(st.lists(st.integers(128, 255), min_size=8, max_size=60))
def test_bytes_that_are_no_text_do_not_hold_the_stream_up(tokens):
    stream = TextStream(Bytes())
    for token in tokens:
        stream.push(token)
        assert stream.held <= 12  # four characters that are none, of up to three bytes


def test_a_character_split_over_tokens_is_sent_whole():
    steps, text = run(list("a😀b".encode()))
    assert text == "a😀b"
    assert [step.text for step in steps] == ["a", "😀", "b", ""]
    assert [len(step.tokens) for step in steps] == [1, 4, 1, 0]


def test_a_stop_string_over_three_tokens_is_cut_out_exactly():
    steps, text = run([*b"x", *b"E", *b"N", *b"D", *b"y"], ["END"])
    assert text == "x" and steps[-1].stopped
    assert steps[-1].tokens == tuple(b"END") and steps[-1].cut_chars == 3


def test_a_stop_string_inside_one_token_keeps_what_stands_before_it():
    steps, text = run([*b"a", 265], ["\n"])  # 265 is "b\n"
    assert text == "ab" and steps[-1].cut_chars == 1


@pytest.mark.parametrize("held", ["E", "EN"])
def test_what_looked_like_a_stop_string_is_sent_after_all(held):
    steps, text = run([*held.encode(), *b"!"], ["END"])
    assert text == held + "!" and not any(step.stopped for step in steps)


def test_an_unfinished_stop_string_at_the_end_is_text():
    assert run(list(b"xEN"), ["END"])[1] == "xEN"


def test_without_a_decoder_every_token_goes_at_once():
    stream = TextStream(None)
    assert [stream.push(token).tokens for token in (5, 6)] == [(5,), (6,)]
    assert stream.flush().tokens == ()
