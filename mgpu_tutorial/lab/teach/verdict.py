"""A word on a plate, whose own background can be read in a light and a dark theme."""

import html
import re
from dataclasses import dataclass

RIGHT, WRONG, OPEN = "#1b6e3c", "#b00020", "#595959"  # white stands out from each
PLATES = {True: ("✓ ", RIGHT), False: ("✗ ", WRONG), None: ("", OPEN)}
PRE = '<pre style="margin:2px 0;white-space:pre-wrap;word-break:normal">'
MARK = ' \n<div class="verdict">'  # of a folded output the lab shows the first line, as text


def page_of(word: str, is_right: bool | None, reason: str) -> str:
    """HTML: the word on its plate, beside it the reason, and further lines of that below."""
    mark, background = PLATES[is_right]
    style = f"background:{background};color:#ffffff;font-weight:bold"
    page = f'<span style="{style};padding:1px 8px;border-radius:4px">{mark}{word}</span>'
    first, _, rest = reason.partition("\n")
    page += f" {written(first)}" if first else ""
    return page + (f"{PRE}{written(rest)}</pre>" if rest else "")


def written(text: str) -> str:
    """HTML of a text in which code stands between backticks."""
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", html.escape(text))


@dataclass
class Verdict:
    """What a check says of an answer; its text begins with the word on the plate."""

    word: str
    is_right: bool | None  # None where nothing was judged
    reason: str = ""
    hint: str = ""

    def __repr__(self) -> str:
        said = f"{self.word}: {self.reason}" if self.reason else self.word
        return f"{said}\nhint: {self.hint}" if self.hint else said

    def _repr_html_(self) -> str:
        body = page_of(self.word, self.is_right, self.reason)
        if self.hint:
            body += f"<br><i>hint: {written(self.hint)}</i>"
        return f"{MARK}{body}</div>"
