"""Prompt for haiku from a small story model."""

#: Few-shot prompt with two haiku. documents/test_haiku.py gives the reason.
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
