"""Puts measured texts into a page, between `<!-- measured: name -->` and `<!-- end -->`."""

import re


def fill(path, texts):
    """Replace what stands between the marks of each name; names without marks and marks without texts are errors."""
    page = path.read_text()
    wanted = set(re.findall(r"<!-- measured: ([\w-]+) -->", page))
    if wanted != set(texts):
        raise SystemExit(f"{path.name}: measured and marked names differ: {', '.join(sorted(wanted ^ set(texts)))}")
    for name, text in texts.items():
        block = "\n" in text
        between = f"\n{text.strip()}\n" if block else text
        page = re.sub(
            rf"(<!-- measured: {name} -->).*?(<!-- end -->)",
            lambda match, between=between: match[1] + between + match[2],
            page,
            flags=re.DOTALL,
        )
    path.write_text(page)


def markdown_table(head, rows):
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
