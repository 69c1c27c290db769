"""The text that a small story model continues with."""

from __future__ import annotations

#: Two haiku that show what is meant; see the test for why.
SHOWN = """Each haiku names its minute and its word.

Minute: twelve. Word: robin.
Haiku: Minute twelve has come,
the robin sings in the rain,
and the day is long.

Minute: forty-one. Word: pebble.
Haiku: Minute forty-one,
the pebble rests in the stream,
and the moon is cold.

Minute: {}. Word: {}.
Haiku:"""
