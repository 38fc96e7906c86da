"""The chat in a terminal: answers stream, relaxed tokens are coloured, `!!` commands change the rule between turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from rich.console import Console
from rich.text import Text

from eagle_mars.chat.conversation import Conversation
from eagle_mars.chat.response import Response
from eagle_mars.chat.session import ChatOptions, ChatService
from eagle_mars.config import Rule, VerifyConfig
from eagle_mars.errors import ConfigError, EagleMarsError
from eagle_mars.render import STYLES
from eagle_mars.result import GenerationResult, Provenance
from eagle_mars.verify.guarantee import guarantee

_PROMPT = "> "
_BLOCK = '"""'
_READS_THETA = ("mars", "mars-paper", "mars-released")

Colours = Literal["relaxed", "all", "off"]
_SHOWN: dict[Colours, frozenset[Provenance]] = {
    "relaxed": frozenset({"relaxed"}),
    "all": frozenset({"relaxed", "exact"}),
    "off": frozenset(),
}


class Terminal:
    """One chat until the input ends or `!!exit`.

    options: of every answer; commands change them. read: `input`, or something with its signature.
    """

    def __init__(
        self,
        service: ChatService,
        options: ChatOptions,
        console: Console,
        read: Callable[[str], str],
        system: str | None = None,
    ) -> None:
        self._service = service
        self._options = options
        self._console = console
        self._read = read
        self._conversation = Conversation(system)
        self._results: list[GenerationResult] = []
        self._colours: Colours = "relaxed"
        self._commands: dict[str, Callable[[str], None]] = {
            "exit": self._exit,
            "reset": self._reset,
            "remove": self._remove,
            "regen": self._regenerate,
            "save": self._save,
            "load": self._load,
            "theta": self._theta,
            "rule": self._rule,
            "temperature": self._temperature,
            "colour": self._colour,
            "stats": self._stats,
            "help": self._help,
        }

    def run(self) -> None:
        """Read, answer, repeat."""
        self._note(f"{self._promise()} !!help lists the commands, {_BLOCK} begins and ends a text of several lines.")
        try:
            while True:
                self._turn(self._message())
        except EOFError:  # the end of the input, or !!exit
            self._console.print()

    def _turn(self, text: str) -> None:
        """One message: a question or a command; a mistake is told and the chat goes on."""
        try:
            if text.startswith("!!"):
                self._command(text[2:])
            elif text.strip():
                self._conversation.ask(text)
                self._answer()
        except EagleMarsError as error:
            self._console.print(Text(f"error: {error}", style="bold red"), soft_wrap=True)

    def _message(self) -> str:
        """One line, several that end with a backslash, or everything between two lines of triple quotes."""
        line = self._read_line(_PROMPT)
        if line.strip() == _BLOCK:
            lines = []
            while (line := self._read_line("")).strip() != _BLOCK:
                lines.append(line)
            return "\n".join(lines)
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._read_line(""))
        return "\n".join(lines)

    def _read_line(self, prompt: str) -> str:
        while True:
            try:
                return self._read(prompt if self._console.is_terminal else "")
            except KeyboardInterrupt:
                self._note("\nnothing is running; !!exit or Ctrl-D ends the chat.")
            except UnicodeDecodeError:
                self._note("that line holds bytes that are no UTF-8; write it again.")

    def _answer(self) -> None:
        """Answer the conversation. Raises what decoding raises; the question is forgotten then."""
        try:
            said = self._say(self._service.chat(self._conversation.messages, self._options))
        except EagleMarsError:
            self._conversation.take_back_question()
            raise
        self._conversation.answer(said)

    def _say(self, response: Response) -> str:
        """Stream the answer, and give its text; Ctrl-C stops it, and what has come so far stays."""
        said: list[str] = []
        try:
            for pieces in response:
                for piece in pieces:
                    said.append(piece.text)
                    style = STYLES[piece.provenance] if piece.provenance in _SHOWN[self._colours] else ""
                    self._console.print(Text(piece.text, style=style), end="", soft_wrap=True)
        except KeyboardInterrupt:
            response.cancel()
            self._console.print()
            self._note("stopped.")
        else:
            self._console.print()
            self._results.append(response.result)
            self._note(self._status(response.result))
        return "".join(said)

    def _status(self, result: GenerationResult) -> str:
        verify = self._verify
        rule = result.rule
        if verify.rule in _READS_THETA and verify.relaxes:
            rule += f" gap={verify.gap:g}" if verify.margin == "logit-gap" else f" θ={verify.theta:g}"
        parts = [rule, f"{result.new_tokens} tokens", f"{result.tokens_per_second:.1f}/s", f"tau {result.tau:.2f}"]
        if result.relaxed:
            first = result.exact_prefix_tokens
            parts.append(
                f"{result.relaxed} relaxed, the first after {first} tokens, {result.regret:.2f} nats of regret"
            )
        elif verify.relaxes:
            parts.append("0 relaxed: this is the exact answer" if verify.rule == "mars" else "0 relaxed")
        return " · ".join(parts) + (" · cut at the token limit" if result.finish_reason == "length" else "")

    # --- commands ---

    def _command(self, line: str) -> None:
        name, _, argument = line.strip().partition(" ")
        name = {"color": "colour"}.get(name, name)
        if name not in self._commands:
            raise ConfigError(f"!!{name} is no command; !!help lists them.")
        self._commands[name](argument.strip())

    def _exit(self, argument: str) -> None:
        """end the chat"""
        raise EOFError

    def _reset(self, argument: str) -> None:
        """begin anew; the system message stays"""
        self._conversation.reset()
        self._note("the conversation is empty.")

    def _remove(self, argument: str) -> None:
        """forget the last question and its answer"""
        self._conversation.take_back_turn()
        self._note("the last turn is forgotten.")

    def _regenerate(self, argument: str) -> None:
        """answer the last question again"""
        self._conversation.take_back_answer()
        self._answer()

    def _save(self, argument: str) -> None:
        """FILE: write the conversation as JSON"""
        path = _path(argument)
        self._conversation.save(path)
        self._note(f"saved to {path}.")

    def _load(self, argument: str) -> None:
        """FILE: go on with a saved conversation"""
        path = _path(argument)
        self._conversation.load(path)
        self._note(f"{len(self._conversation.messages)} messages from {path}.")

    def _theta(self, argument: str) -> None:
        """X: relax where z2/z1 > X; 1 or off is exact"""
        theta = None if argument == "off" else _number("!!theta", argument)
        rule = self._verify.rule if self._verify.rule in _READS_THETA else "mars"
        self._decide(self._verify.replace(rule=rule, theta=theta, margin="logit-ratio", gap=None))

    def _rule(self, argument: str) -> None:
        """NAME: exact, mars, ...: the acceptance rule"""
        if argument not in get_args(Rule):
            raise ConfigError(f"there is no rule {argument!r}; known are {', '.join(get_args(Rule))}.")
        self._decide(self._verify.replace(rule=argument))

    def _temperature(self, argument: str) -> None:
        """X: 0 is greedy"""
        value = _number("!!temperature", argument)
        self._options = replace(self._options, sampling=self._options.sampling.replace(temperature=value))
        self._note(f"temperature is {value:g}.")

    def _colour(self, argument: str) -> None:
        """colour relaxed tokens, then every drafted one, then none"""
        order = get_args(Colours)
        self._colours = order[(order.index(self._colours) + 1) % len(order)]
        self._note(f"coloured tokens: {self._colours}.")

    def _stats(self, argument: str) -> None:
        """counts of all answers so far"""
        results = self._results
        tokens, cycles = sum(r.new_tokens for r in results), sum(r.cycles for r in results)
        seconds = sum(r.seconds for r in results)
        speed = tokens / seconds if seconds else 0.0
        tau = sum(r.tau * r.cycles for r in results) / cycles if cycles else 0.0
        self._note(
            f"{len(results)} answers · {tokens} tokens in {seconds:.1f} s ({speed:.1f}/s) · "
            f"{cycles} cycles · tau {tau:.2f} · {sum(r.relaxed for r in results)} relaxed · "
            f"{sum(r.regret for r in results):.2f} nats of regret"
        )

    def _help(self, argument: str) -> None:
        """this list"""
        for name, command in self._commands.items():
            self._note(f"!!{name:<12} {command.__doc__}")

    # --- the rule, and notes ---

    @property
    def _verify(self) -> VerifyConfig:
        return self._options.verify or self._service.verify

    def _decide(self, verify: VerifyConfig) -> None:
        self._service.limits.check(verify, self._options.draft or self._service.model.draft)
        self._options = replace(self._options, verify=verify)
        self._note(self._promise())

    def _promise(self) -> str:
        return f"rule {self._verify.rule}. {guarantee(self._verify)}"

    def _note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))


def _number(command: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{command} needs a number, not {text!r}.") from None


def _path(argument: str) -> Path:
    if not argument:
        raise ConfigError("name a file.")
    return Path(argument).expanduser()
