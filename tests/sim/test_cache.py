"""KV memory: what is shared, what is remembered, what goes first."""

from fastload.sim.cache import Blocks, chain


def test_chain_is_equal_as_far_as_prompts_begin_alike() -> None:
    one, other = chain("aaaabbbbcccc", 4), chain("aaaabbbbdddd", 4)
    assert one[:2] == other[:2] and one[2] != other[2]
    assert len(chain("aaaabb", 4)) == 1  # full blocks only
    assert chain("bbbb", 4)[0] != one[1]  # the same block behind something else is another


def test_shared_blocks_are_held_once() -> None:
    blocks = Blocks(10, remember=True)
    assert blocks.hold((1, 2, 3), 1) and blocks.hold((1, 2, 4), 1)
    assert blocks.used == 6
    blocks.release((1, 2, 3), 1)
    assert blocks.used == 4 and blocks.known((1, 2, 3)) == 3


def test_least_recently_held_goes_first_and_a_prompts_end_before_its_beginning() -> None:
    blocks = Blocks(4, remember=True)
    blocks.hold((1, 2), 0)
    blocks.release((1, 2), 0)
    blocks.hold((3, 4), 0)
    blocks.release((3, 4), 0)
    blocks.hold((5,), 0)
    assert (blocks.known((1, 2)), blocks.known((3, 4))) == (1, 2)


def test_no_room_takes_nothing() -> None:
    blocks = Blocks(3, remember=True)
    assert blocks.hold((1, 2), 1)
    assert not blocks.hold((1, 7), 0) and not blocks.grow()
    assert blocks.used == 3 and blocks.hold((1, 2), 0)


def test_without_memory_for_prefixes_nothing_stays() -> None:
    blocks = Blocks(4, remember=False)
    blocks.hold((1, 2), 0)
    blocks.release((1, 2), 0)
    assert blocks.known((1, 2)) == 0
