"""A conversation of several turns, of which the last ones come in decode with the model's own words between them."""

from __future__ import annotations

from random import Random

from kvsim.capture.prompt import QUESTION
from kvsim.capture.tasks.hide import Fact, Story
from kvsim.capture.tasks.keys import key
from kvsim.capture.tasks.render import Piece

SAYS = 24  # tokens that the model says of its own in a turn


def chat(rng: Random) -> Story:
    """The user gives a text to read, in the middle of it a pass key; asks for something else, which the model answers in 24 tokens of
    its own; then for the key. Written with plain speakers' names, so that models without a chat template can do it."""
    k = key(rng)
    fact = Fact(
        f"My pass key is {k}. Keep {k} for me.",
        before="\n\nAssistant: I have read it.\n\nUser: ",
        after="\n\nAssistant: I will.\n\nUser: Now read on.\n\n",
    )
    fed = Piece("User: In a few words, what is the text about?\n\nAssistant:", QUESTION, fed=True, free=SAYS)
    return Story(
        (fact,),
        "\n\nUser: And what is my pass key?\n\nAssistant: Your pass key is",
        (k,),
        lead="User: Read this text.\n\n",
        tail="\n\nAssistant: I have read it.\n\n",
        fed=(fed,),
    )
