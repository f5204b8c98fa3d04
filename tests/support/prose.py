"""Paragraphs, table cells and words of a Markdown page, to check how it reads."""

import re
import sys
from pathlib import Path
from typing import NamedTuple

LONGEST_PARAGRAPH = 90
LONGEST_CELL = 25
LONGEST_STRETCH = 120  # words between two headings
PERSONS = re.compile(r"\b(nobody|whoever|somebody|told)\b", re.IGNORECASE)
QUANTITIES_PER = re.compile(
    r"\b(trajectories|rows?|samples?|seconds?|steps?|ps|ns|ms|messages?) an? "
    r"(iteration|trajectory|step|sample|call|site|resonator|second|device|batch|line)\b"
)


class Remark(NamedTuple):
    """One place of a page that breaks a rule of the style."""

    line: int
    rule: str
    text: str


class Block(NamedTuple):
    """A heading, a paragraph, an item of a list or a row of a table."""

    line: int
    kind: str
    text: str


def count_words(text: str) -> int:
    """Words of a text: links count by their label, a formula or code in backticks as one word."""
    text = re.sub(r"\$\$.*?\$\$|\$[^$]*\$|`[^`]*`", " code ", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def split_blocks(page: str) -> list[Block]:
    """Blocks of a page in order, without code, display equations and directives."""
    blocks: list[Block] = []
    gathered: list[str] = []
    begin = 0
    fence = ""

    def close(kind: str = "paragraph") -> None:
        if gathered:
            blocks.append(Block(begin, kind, "\n".join(gathered)))
            gathered.clear()

    for number, line in enumerate(page.splitlines(), 1):
        bare = line.strip()
        mark = re.match(r"(```+|~~~+|\$\$)", bare)
        if fence:
            if bare.endswith(fence):
                fence = ""
        elif mark:
            close()
            opened = mark.group()
            fence = "" if opened == "$$" and bare.endswith("$$") and len(bare) > 2 else opened
        elif not bare:
            close()
        elif bare.startswith("#"):
            close()
            blocks.append(Block(number, "heading", bare.lstrip("# ")))
        elif bare.startswith("|"):
            close()
            blocks.append(Block(number, "row", bare))
        else:
            if re.match(r"([-*+]|\d+\.) ", bare):
                close()
            if not gathered:
                begin = number
            gathered.append(bare)
    close()
    return blocks


def find_remarks(page: str) -> list[Remark]:
    """Every place of a page that breaks a rule of the style."""
    remarks = []
    since_heading = 0
    for block in split_blocks(page):
        if block.kind == "heading":
            since_heading = 0
        elif block.kind == "row":
            cells = re.split(r"(?<!\\)\|", block.text.strip("|"))
            long_cells = [cell for cell in cells if count_words(cell) > LONGEST_CELL]
            remarks += [Remark(block.line, "long cell", cell.strip()) for cell in long_cells]
        else:
            words = count_words(block.text)
            since_heading += words
            if words > LONGEST_PARAGRAPH:
                remarks.append(Remark(block.line, f"paragraph of {words} words", block.text))
            if since_heading > LONGEST_STRETCH:
                remarks.append(Remark(block.line, f"{since_heading} words without a heading", ""))
                since_heading = 0
        prose = re.sub(r"`[^`]*`", "", block.text)
        remarks += [Remark(block.line, "person", word) for word in PERSONS.findall(prose)]
        for match in QUANTITIES_PER.finditer(prose):
            remarks.append(Remark(block.line, "per", match.group()))
    return remarks


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for remark in find_remarks(Path(name).read_text()):
            print(f"{name}:{remark.line}: {remark.rule}: {remark.text[:70]!r}")
