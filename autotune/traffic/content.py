"""What requests say: each class's prompts, fitted to lengths, behind their shared prefixes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.errors import invalid
from autotune.paths import user_path
from autotune.strict import read_text
from autotune.traffic.classes import TrafficClass
from autotune.traffic.fitting import TextFitter, behind_context
from autotune.traffic.pools import Part, load_pools
from autotune.traffic.profile import TrafficProfile
from autotune.traffic.prompts import Conversation, Prompt
from autotune.traffic.schedule import PromptRealism
from autotune.traffic.tokens import TokenCounter
from autotune.traffic.trace import Trace

MAX_PREFIX_BYTES = 4 * 1024 * 1024
MAX_CHARS = 500_000_000
"""More text than one measurement can sensibly hold; a guard for memory."""


@dataclass(frozen=True)
class Blocks:
    """What a prompt of a trace is made of; prompts with equal leading ids share that much."""

    ids: tuple[int, ...]
    num_tokens: int
    """Of each block."""


class Content:
    """The prompts of one schedule."""

    def __init__(
        self,
        profile: TrafficProfile,
        seed: int,
        rng: random.Random,
        counter: TokenCounter,
        part: Part,
        trace: Trace | None = None,
    ) -> None:
        """Load the prompts of every class.

        Args:
            profile: says which.
            seed: decides what is put together.
            rng: decides the order of the prompts.
            counter: measures tokens.
            part: for the search, or on the prompts held out from it.
            trace: what is replayed, if anything; it may bring all prompts itself.

        Raises:
            InputError: a file cannot be used, or a class has too few prompts.
        """
        self._profile = profile
        self._seed = seed
        self._counter = counter
        self._part = part
        self._has_trace = trace is not None
        self._has_text = trace is not None and trace.has_text
        self._pools = load_pools(profile.classes, profile.folder, rng, counter)
        self._check_pools()
        self._prefix_files = {c.name: self._prefix_file(c) for c in profile.classes}
        self._num_chars = 0
        # What many requests share is made once.
        self._fitters: dict[str, TextFitter] = {}
        self._stand_ins: dict[tuple[str, int], str] = {}
        self._blocks: dict[tuple[int, int], str] = {}

    def has_pool(self, c: TrafficClass) -> bool:
        """Whether the class has prompts; without, a trace brings them."""
        return c.name in self._pools

    def conversation(
        self, c: TrafficClass, number: int, *, for_warmup: bool = False
    ) -> Conversation:
        """Return one conversation; after the last one comes the first again."""
        pool = self._pools[c.name]
        conversations = pool.warmup if for_warmup else pool.of(self._part)
        return conversations[number % len(conversations)]

    def fitted(self, c: TrafficClass, prompt: Prompt, num_tokens: int, key: str) -> Prompt:
        """Fit a prompt, as one message, to a length; it keeps its id, since it asks the same.

        Args:
            c: whose prompts are the context.
            prompt: what is asked.
            num_tokens: wanted length.
            key: equal keys begin alike, different ones differ at once.
        """
        text = self._fitter(c).around(prompt.text, num_tokens, key)
        return Prompt(prompt.prompt_id, (("user", text),))

    def of_blocks(
        self, c: TrafficClass, prompt: Prompt, num_tokens: int, blocks: Blocks, key: str
    ) -> Prompt:
        """Put a prompt together of blocks, so that equal leading ids share their text.

        The question stands at the end, in the place of as much of the last blocks; it is cut to a
        block, so that no more than that is lost to it.

        Args:
            c: whose prompts are the context, where there are fewer blocks than the length needs.
            prompt: what is asked.
            num_tokens: wanted length.
            blocks: of the prompt.
            key: see `fitted`.
        """

        def context(room: int) -> str:
            num_whole, num_more = divmod(room, blocks.num_tokens)
            whole, partly = blocks.ids[:num_whole], blocks.ids[num_whole : num_whole + 1]
            texts = [self._block(blocks.num_tokens, block) for block in whole]
            if num_more and partly:
                last = self._block(blocks.num_tokens, partly[0])
                texts.append(self._counter.cut(last, num_more))
            missing = room - blocks.num_tokens * len(whole) - num_more * len(partly)
            if missing > 0:
                texts.append(self._fitter(c).passage(missing, key))
            return " ".join(texts)

        question = self._counter.cut(prompt.text, blocks.num_tokens)
        text = behind_context(question, num_tokens, self._counter, context)
        return Prompt(prompt.prompt_id, (("user", text),))

    def prefixed(self, c: TrafficClass, prompt: Prompt, number: int) -> Prompt:
        """Put the class's shared prefix before a prompt, as (part of) its system message.

        Args:
            c: the class.
            prompt: any; it keeps its id.
            number: of the conversation within its class; the groups take turns.
        """
        prefix = self._prefix(c, number)
        if prefix is not None:
            (role, content), *rest = prompt.messages
            if role == "system":
                messages = (("system", f"{prefix}\n\n{content}"), *rest)
            else:
                messages = (("system", prefix), *prompt.messages)
            prompt = Prompt(prompt.prompt_id, messages)
        self._check_size(prompt)
        return prompt

    @property
    def realism(self) -> PromptRealism:
        """How real the prompts are: the least real of all that is sent decides."""
        if self._has_text:
            return PromptRealism.USER
        kinds = {pool.realism for pool in self._pools.values()}
        if PromptRealism.RANDOM in kinds:
            return PromptRealism.RANDOM
        if self._is_fitted or PromptRealism.PROXY in kinds:
            return PromptRealism.PROXY
        return PromptRealism.USER

    def notes(self) -> Iterator[str]:
        """Say what the user should know about the prompts."""
        yield from dict.fromkeys(note for pool in self._pools.values() for note in pool.notes)
        if self._is_fitted and not self._counter.is_exact:
            yield "the model's tokenizer is not at hand, so prompt lengths are estimates"
        for c in self._profile.classes:
            if c.shared_prefix is not None and c.shared_prefix.tokens is not None:
                yield (
                    f"class {c.name!r}: the shared prefix is a stand-in; give `shared_prefix.file` "
                    "for the real one"
                )

    @property
    def _is_fitted(self) -> bool:
        if self._has_trace:
            return not self._has_text
        return any(c.lengths is not None for c in self._profile.classes)

    def _check_pools(self) -> None:
        if self._has_text:
            return
        for number, c in enumerate(self._profile.classes):
            if not self.has_pool(c):
                raise invalid(
                    "the key is required, since the trace has no text of its own",
                    where=self._profile.where,
                    key_path=f"classes[{number}].prompts",
                    next_step="Give prompts of your own, or a built-in set.",
                )

    def _check_size(self, prompt: Prompt) -> None:
        self._num_chars += prompt.num_chars
        if self._num_chars > MAX_CHARS:
            raise invalid(
                f"the prompts of one measurement must hold at most {MAX_CHARS:,} characters in all",
                where=self._profile.where,
                next_step="Ask for fewer requests, or shorter ones.",
            )

    def _fitter(self, c: TrafficClass) -> TextFitter:
        """Return what fits the class's prompts, with others of its prompts as context."""
        pool = self._pools[c.name]
        return self._made_fitter(c.name, (*pool.warmup, *pool.of(self._part)))

    def _prefix_fitter(self, c: TrafficClass) -> TextFitter:
        """Return what makes stand-ins: of the warm-up's prompts, so that none is measured."""
        if c.name not in self._pools:
            number = self._profile.classes.index(c)
            raise invalid(
                "a stand-in for the shared prefix is made of the class's prompts, and it has none",
                where=self._profile.where,
                key_path=f"classes[{number}].shared_prefix",
                next_step="Give `file`, or `prompts`.",
            )
        return self._made_fitter(f"prefix {c.name}", self._pools[c.name].warmup)

    def _made_fitter(self, name: str, conversations: Sequence[Conversation]) -> TextFitter:
        if name not in self._fitters:
            texts = [conversation.turns[0].prompt.text for conversation in conversations]
            self._fitters[name] = TextFitter(texts, self._counter, f"{self._seed} {name}")
        return self._fitters[name]

    def _block(self, num_tokens: int, block: int) -> str:
        key = num_tokens, block
        if key not in self._blocks:
            # Of the first class, whatever the request's: ids are shared across all of them.
            fitter = self._fitter(self._profile.classes[0])
            self._blocks[key] = fitter.passage(num_tokens, f"block {block}")
        return self._blocks[key]

    def _prefix_file(self, c: TrafficClass) -> str | None:
        if c.shared_prefix is None or c.shared_prefix.file is None:
            return None
        path = self._profile.folder / user_path(c.shared_prefix.file, "shared_prefix.file")
        text = read_text(path, "shared prefix", MAX_PREFIX_BYTES).rstrip("\n")
        if not text.strip():
            raise invalid("the shared prefix must not be empty", where=path)
        return text

    def _prefix(self, c: TrafficClass, number: int) -> str | None:
        shared = c.shared_prefix
        if shared is None or shared.tokens is None:
            return self._prefix_files[c.name]
        key = c.name, number % shared.groups
        if key not in self._stand_ins:
            fitter = self._prefix_fitter(c)
            self._stand_ins[key] = fitter.passage(shared.tokens, f"prefix {key[1]}")
        return self._stand_ins[key]
