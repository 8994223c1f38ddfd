"""Read the content of a report page."""

from html.parser import HTMLParser

EVIL = '<b>"><script>window.evil = 1</script><img src=x onerror="window.evil = 2">\u2028</script x'


class Page(HTMLParser):
    """What is in a page: its elements, the text of each script, all other text. Every tag must close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name, given):
        self.elements.append((name, dict(given)))
        if name not in {"meta", "circle", "line"}:
            self.open.append(name)
        if name == "script":
            self.scripts.append("")

    def handle_startendtag(self, name, given):
        self.elements.append((name, dict(given)))

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] != "style":
            self.text += data + "\n"
