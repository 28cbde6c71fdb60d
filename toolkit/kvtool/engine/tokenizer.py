"""Text to token ids and back, and messages to a prompt, from the files of an engine directory.

A chat template is a program that came with the checkpoint. It runs in jinja2's immutable sandbox, as transformers runs
it, and what it refuses (a role it does not know, say) is the request's fault and not ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from kvtool.engine.manifest import read_manifest
from kvtool.errors import EngineRefused, RequestRefused


class Tokenizer:
    """The tokenizer of the engine in `directory`. Thread-safe; loads in about 0.1 s.

    Raises:
        EngineRefused: no engine there, or tokenizer files that cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer as Fast

        manifest = read_manifest(directory)
        path = directory / "tokenizer.json"
        try:
            self._fast = Fast.from_file(str(path))
            config = directory / "tokenizer_config.json"
            settings: dict[str, Any] = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
            jinja = directory / "chat_template.jinja"
            template = jinja.read_text(encoding="utf-8") if jinja.is_file() else settings.get("chat_template")
        except Exception as error:  # tokenizers raises bare Exception
            raise EngineRefused(f"{path}: the tokenizer cannot be read ({error}); build the engine again") from None
        self._fast.no_truncation()
        self._fast.no_padding()
        self.vocab_size = manifest.vocab_size
        self.eos_token_ids = frozenset(manifest.eos_token_ids)
        self.bos_token_id = manifest.bos_token_id
        self._bos = None if self.bos_token_id is None else self._fast.id_to_token(self.bos_token_id)
        self._specials = {key: _content(value) for key, value in settings.items() if key.endswith("_token")}
        self._template = _compile(template, directory)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Special tokens written out in it are recognised. A checkpoint that wants a leading BOS
        gets one, unless `text` begins with it already, as chat templates' output does."""
        leading = not (self._bos and text.startswith(self._bos))
        ids: list[int] = self._fast.encode(text, add_special_tokens=leading).ids
        return ids

    def decode(self, ids: Sequence[int], keep_special: bool = False) -> str:
        """Text of `ids`; bytes that are no whole character yet show as U+FFFD. Special tokens (EOS and the like) are
        left out unless `keep_special`."""
        text: str = self._fast.decode(list(ids), skip_special_tokens=not keep_special)
        return text

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text for `messages` ({"role", "content"}), ending where the assistant's answer begins.

        Raises:
            RequestRefused: no chat template, messages of another form, or ones that the template refuses.
        """
        if self._template is None:
            raise RequestRefused("this engine has no chat template; send plain text instead of messages")
        if not messages:
            raise RequestRefused("messages: wanted at least one, found none")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                raise RequestRefused(f"messages[{index}]: wanted a table with role and content, found {message!r:.80}")
        try:
            text: str = self._template.render(
                messages=[dict(message) for message in messages], add_generation_prompt=True, **self._specials
            )
        except Exception as error:  # a template may raise anything
            raise RequestRefused(f"the chat template refuses these messages: {error}") from None
        return text


def _content(token: Any) -> Any:
    """A token as tokenizer_config.json has it: a string, or a table with its content."""
    return token.get("content") if isinstance(token, dict) else token


def _compile(template: Any, directory: Path) -> Any:
    """The compiled chat template, or None. Environment as in transformers' `chat_template_utils`."""
    if isinstance(template, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if template is None:
        return None
    from jinja2 import TemplateSyntaxError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except (TemplateSyntaxError, TypeError) as error:
        raise EngineRefused(
            f"{directory}: the chat template cannot be read ({error}); build the engine again"
        ) from None


def _refuse(message: str) -> None:
    raise RequestRefused(message)
