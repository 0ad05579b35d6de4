"""Numbers, words and orders drawn from a seed: the same on every machine and with every Python.

Of Python's generator only `random()` is used: that it stays as it is, is what the documentation of `random` promises.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

DIGITS = 7  # of a number, as in RULER
ADJECTIVES = """
    able acid agile amber ancient ashen awake bald basic beige bitter bland blank blind blunt bold brave brief bright
    brisk broad brown calm careful cheap chilly clean clear clever coarse cold cool coral crisp cruel curly damp dark
    deaf dear deep dense dim dizzy double dry dull dusty eager early easy elder empty equal even exact fair faint fast
    fatal fierce final fine firm flat fluffy foggy fond formal fragile frank free fresh frosty full funny gentle giant
    glad golden grand grave great green grim guilty handy happy harsh hasty heavy hidden high hollow honest huge
    humble hungry icy ideal idle jolly keen kind large late lazy lean legal light little local lonely long loose loud
    lovely loyal lucky lunar mad major mellow merry mild minor misty modern moist narrow nasty neat nervous new nimble
    noble noisy normal northern odd old open orange oval pale patient perfect pink plain pleasant plump polite poor
    proud pure purple quick quiet rapid rare raw ready red rich rigid ripe robust rough round royal rude rural rusty
    sad salty sandy scarce secret serious shallow sharp shiny short shy silent silly silver simple skinny sleepy slim
    slow small smart smooth soft solar solid sore sour spare spicy square stable stale steady steep stiff strange
    strict strong sturdy subtle sudden sunny sweet swift tall tame tart tender thick thin thirsty tidy tight tiny
    tired tough tropical true ugly urban useful vague vain vast violet vital vivid warm wary weak wealthy weird wet
    white whole wicked wide wild wise wooden young
""".split()
NOUNS = """
    acorn actor almond anchor ankle apple apron arrow atlas attic autumn badge baker balloon banana banjo barn barrel
    basket beach beacon bean bear beaver bell bench berry bicycle bird biscuit blanket blossom boat bottle boulder
    bowl branch bread breeze brick bridge broom brother brush bucket buckle butter button cabin cactus camel camera
    candle canoe canyon carpet carrot castle cattle cave cedar cellar chain chair chalk cheese cherry chest chicken
    chimney circle circus city clay cliff clock cloud clover coach coast coat coffee coin comet cookie copper cotton
    cousin crab cradle crane crayon creek cricket crow crown cup curtain dagger daisy dancer deer desert desk diamond
    dinner doctor dog dolphin donkey door dragon drawer dream dress drum duck eagle ear earth elbow elephant engine
    evening falcon family farmer feather fence fern field finger fire fish flag flame flower flute forest fork
    fountain fox frog fruit galaxy garden garlic gate ghost giraffe glass glove goat gorilla grape grass guitar hammer
    harbor hat hawk helmet hill honey horse hotel house island ivory jacket jar jewel judge juice jungle kettle key
    king kite kitten knee knife ladder lake lamp lantern lemon letter library lily lion lizard lobster lock magnet
    maple map marble market meadow melon mirror monkey moon morning moss mother motor mountain mouse museum mushroom
    napkin needle nest notebook nurse oak oasis ocean octopus olive onion orchard otter oven owl oyster paddle painter
    palace panda panther paper parrot peach peacock pearl pebble pencil pepper piano pigeon pillow pilot pirate planet
    plate pocket poet pond potato prince puppy puzzle queen rabbit raccoon railway rain raven ribbon rice river robin
    rocket roof rope rose ruby saddle sailor salad salmon sandal saucer scarf school seal shadow shark sheep shell
    ship shoe shovel singer sister snail snow soldier soup spider spoon squirrel stadium statue stone storm stove
    street sugar summer swan table tailor teacher temple tent thread throne thunder tiger toast tomato tower train
    tree trumpet tulip tunnel turkey turtle umbrella uncle valley vase village vine violin wagon wallet walnut water
    whale wheat wheel whistle willow window winter wolf wool zebra
""".split()


class Draws:
    """A stream of draws that depends on the given names and numbers alone."""

    def __init__(self, *seed: object):
        self._seed = seed
        self._next = random.Random("/".join(map(str, seed))).random

    def fork(self, name: str) -> Draws:
        """Return a stream of its own, the same whatever was drawn here."""
        return Draws(*self._seed, name)

    def below(self, count: int) -> int:
        """Return a number from 0 to count - 1."""
        return int(self._next() * count)

    def pick(self, items: Sequence[T]) -> T:
        """Return one of the items."""
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """Return the items in another order."""
        return self.sample(items, len(items))

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """Return `count` of the items, no place twice."""
        pool = list(items)
        for i in range(count):
            j = i + self.below(len(pool) - i)
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]

    def number(self, digits: int = DIGITS) -> str:
        """Return a number of `digits` digits, the first of them above 0."""
        least = 10 ** (digits - 1)
        return str(least + self.below(9 * least))

    def text(self, letters: str, length: int) -> str:
        """Return a text of these letters."""
        return "".join(self.pick(letters) for _ in range(length))

    def uuid(self) -> str:
        """Return a random UUID (version 4).

        >>> len(Draws(0).uuid())
        36
        """
        digits = self.text("0123456789abcdef", 32)
        variant = self.pick("89ab")
        return "-".join((digits[:8], digits[8:12], "4" + digits[13:16], variant + digits[17:20], digits[20:]))

    def key(self) -> str:
        """Return an adjective and a noun, as in `brave-otter`."""
        return f"{self.pick(ADJECTIVES)}-{self.pick(NOUNS)}"
