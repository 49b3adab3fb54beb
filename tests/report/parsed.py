"""A page as a browser would read it, as far as tests ask."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br"}


@dataclass
class Node:
    """An element."""

    name: str
    attributes: dict[str, str | None]
    children: list[Node | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text inside."""
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def all(self, name: str = "", class_: str = "") -> list[Node]:
        """Elements inside, in order, by name and class."""
        found = []
        for child in self.children:
            if isinstance(child, Node):
                classes = (child.attributes.get("class") or "").split()
                if (not name or child.name == name) and (not class_ or class_ in classes):
                    found.append(child)
                found += child.all(name, class_)
        return found

    def by_id(self, key: str) -> Node:
        """The element of an id."""
        (found,) = [node for node in self.all() if node.attributes.get("id") == key]
        return found


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), attrs
        node = Node(tag, dict(attrs))
        self._open[-1].children.append(node)
        if tag not in VOID:
            self._open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].name == tag, f"</{tag}> ends <{self._open[-1].name}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)

    def result(self) -> Node:
        assert self._open == [self.root], "an element is open at the end"
        return self.root


def parsed(text: str) -> Node:
    """Read a page; an element that does not end, or ends twice, is an error."""
    parser = _Parser()
    parser.feed(text)
    parser.close()
    return parser.result()
