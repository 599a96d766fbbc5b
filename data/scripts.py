"""The script that a piece of text is written in: Cyrillic, Latin, Han, …

Scripts and not languages: a line of a few words says which letters it uses beyond doubt, but hardly whether it is Russian or
Bulgarian. Python's own Unicode tables name the script of every letter.
"""

import unicodedata
from collections import Counter
from functools import lru_cache

NO_LETTERS = "digits and signs"
JOINED = {"CJK": "Han", "IDEOGRAPHIC": "Han", "HIRAGANA": "Kana", "KATAKANA": "Kana"}


@lru_cache(maxsize=1 << 16)
def letter_script(letter: str) -> str | None:
    """The script of a character; None for what is no letter."""
    if not letter.isalpha():
        return None
    plain = unicodedata.normalize("NFKC", letter)[0]  # wide, narrow, raised and double-struck forms
    first = unicodedata.name(plain, "OTHER").split()[0].split("-")[0]
    return JOINED.get(first, first.capitalize())


def script_of(text: str) -> str:
    """The script of most of the letters."""
    found = Counter(script for script in map(letter_script, text) if script)
    return found.most_common(1)[0][0] if found else NO_LETTERS
