"""Trees of agents: what they compile to, what they say, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import sebulba
from sebulba import Act, AgentNode, Obs, Population, Repeat, UsageError, describe
from sebulba.envs.tree import agents_of, compile_tree
from sebulba.types import COMMON, EnvSpec, Group, MultiAgentSpec, empty_env_step

BOX = spaces.Box(-1, 1, (2,), np.float32)
CHOICE = spaces.Discrete(3)
MASK = Obs(spaces.MultiBinary(3), legal_actions=True)
NODE = AgentNode(Obs(BOX), Act(CHOICE))
OTHER = AgentNode(Obs(CHOICE), Act(BOX))


def shape_of_groups(spec: MultiAgentSpec) -> dict[str, tuple[str, ...]]:
    return {name: group.slots for name, group in spec.groups.items()}


def test_a_lone_node_is_the_spec_of_a_single_agent():
    assert compile_tree(NODE, name="x") == EnvSpec(
        BOX, spaces.Discrete(3, dtype=np.int32), name="x"
    )


def test_equal_nodes_are_slots_of_one_group():
    spec = compile_tree(Population({"b_1": NODE, "a": OTHER, "b_0": NODE}))
    assert shape_of_groups(spec) == {"b": ("b_1", "b_0"), "a": ("a",)}
    assert not spec.groups["b"].waits
    assert compile_tree(Population({"b": NODE}), waits=True).groups["b"].waits


def test_agents_that_differ_in_name_only_are_one_group():
    spec = compile_tree(Population({"alice": NODE, "bob": NODE}))
    assert shape_of_groups(spec) == {"agents": ("alice", "bob")}


def test_names_of_groups_are_unique():
    other = AgentNode(Obs(BOX), Act(spaces.Discrete(4)))
    spec = compile_tree(Population({"a_0": NODE, "a_1": other, "common_0": OTHER}))
    assert list(spec.groups) == ["a", "a_2", "common_2"]


def test_a_repeat_has_slots_that_may_wait():
    tree = Population({"red": Population(Repeat(NODE, most=2)), "blue": OTHER})
    spec = compile_tree(tree)
    assert shape_of_groups(spec) == {"red": ("red.0", "red.1"), "blue": ("blue",)}
    assert (spec.groups["red"].waits, spec.groups["blue"].waits) == (True, False)
    assert list(agents_of(tree)) == ["red.0", "red.1", "blue"]
    assert shape_of_groups(compile_tree(Population(Repeat(NODE, 2)))) == {"agents": ("0", "1")}


def test_parts_of_an_action_that_is_not_atomic_are_slots_that_wait():
    node = AgentNode(Obs(BOX), Act({"turn": CHOICE, "move": BOX, "talk": CHOICE}, non_atomic=True))
    spec = compile_tree(Population({"a": node}))
    assert shape_of_groups(spec) == {"a.move": ("a.move",), "agents": ("a.talk", "a.turn")}
    assert all(group.waits for group in spec.groups.values())


def test_an_atomic_dict_becomes_one_space():
    spec = compile_tree(AgentNode(Obs(BOX), Act({"b": spaces.Discrete(2), "a": CHOICE})))
    assert spec.action_space == spaces.MultiDiscrete([3, 2], dtype=np.int32)
    spec = compile_tree(AgentNode(Obs(BOX), Act(spaces.Dict({"b": BOX, "a": BOX}))))
    assert spec.action_space == spaces.Box(-1, 1, (4,), np.float32)


def test_tags_are_in_the_spec():
    node = AgentNode({"seen": Obs(BOX), "all": Obs(BOX, eval_only=True), "ok": MASK}, Act(CHOICE))
    spec = compile_tree(node)
    assert spec.eval_only == ("all",)
    assert spec.legal_actions == "ok"


def test_a_nested_observation_has_parts_with_dots():
    inside = spaces.Dict({"x": BOX, "y": CHOICE})
    spec = compile_tree(AgentNode({"a": {"b": Obs(inside), "c": Obs(BOX)}}, Act(CHOICE)))
    assert list(spec.observation_space.spaces) == ["a.b.x", "a.b.y", "a.c"]


def test_common_parts_are_once_in_the_arrays_and_in_every_slot():
    tree = Population({"a_0": NODE, "a_1": NODE}, common=Obs(CHOICE))
    spec = compile_tree(tree)
    assert set(spec.groups["a"].spec.observation_space.spaces) == {"observation", COMMON}
    row = empty_env_step(spec, 5)
    assert row.obs["a"]["observation"].shape == (5, 2, 2)
    assert row.obs[COMMON].shape == (5,)
    assert row.prev_action["a"].shape == (5, 2)
    assert row.acting == ()


def test_rows_have_who_acts_for_groups_that_wait_only():
    row = empty_env_step(
        compile_tree(Population({"a": Population(Repeat(NODE, 3)), "b": OTHER})), 4
    )
    assert {name: x.shape for name, x in row.acting.items()} == {"a": (4, 3)}
    assert {name: x.shape for name, x in row.reward.items()} == {"a": (4, 3), "b": (4, 1)}


def test_teams_say_who_is_in_them():
    team = Population({"x": NODE, "y": NODE}, payoff="cooperative", symmetric=True)
    spec = compile_tree(Population({"red": team, "blue": OTHER}, payoff="zero_sum"))
    assert [(t.name, t.slots, t.payoff, t.symmetric) for t in spec.teams] == [
        ("", ("agents/red.x", "agents/red.y", "blue/blue"), "zero_sum", False),
        ("red", ("agents/red.x", "agents/red.y"), "cooperative", True),
    ]


def test_describe_says_who_sees_what():
    node = AgentNode({"seen": Obs(BOX), "all": Obs(BOX, eval_only=True), "ok": MASK}, Act(CHOICE))
    text = describe(Population({"a": Population(Repeat(node, 2)), "b": OTHER}, common=Obs(BOX)))
    for line in (
        "3 agents in 2 groups",
        "group 'a': 2 slots, which may have to wait",
        "observes  all: Box(-1.0, 1.0, (2,), float32) (the learner only)",
        "observes  ok: MultiBinary(3) (masks the actions)",
        "the same for all agents, stored once",
    ):
        assert line in text
    assert "a single agent" in describe(sebulba.env_spec("CartPole-v1"))


def node_of(obs: Any = None, act: Any = None) -> Any:
    return Population({"a": AgentNode(Obs(BOX) if obs is None else obs, act or Act(CHOICE))})


def itself() -> Population:
    members: dict[str, Any] = {}
    tree = Population({"below": Population(members)})
    members["again"] = tree.members["below"]
    return tree


BAD: dict[str, tuple[Any, str]] = {
    "no tree": (None, "the root of the tree is None"),
    "a dict": ({"a": NODE}, "the root of the tree is"),
    "a lone Repeat": (Repeat(NODE, 2), "the root of the tree is"),
    "empty": (Population({}), "the root of the tree has no members"),
    "empty below": (Population({"a": Population({})}), "node 'a' has no members"),
    "a list of members": (Population([NODE]), "has members="),
    "a member that is a space": (Population({"a": BOX}), "node 'a' is Box"),
    "a class for a member": (Population({"a": AgentNode}), "node 'a' is <class"),
    "a number for a name": (Population({1: NODE}), "member name 1"),
    "an empty name": (Population({"": NODE}), "member name ''"),
    "a dot in a name": (Population({"a.b": NODE}), "member name 'a.b'"),
    "a slash in a name": (Population({"a/b": NODE}), "member name 'a/b'"),
    "a star for a name": (Population({"*": NODE}), "member name '*'"),
    "a space in a name": (Population({"a b": NODE}), "member name 'a b'"),
    "a reserved name": (Population({"common": NODE}), "has a member 'common'"),
    "itself": (itself(), "node 'below.again' contains itself"),
    "unequal nodes in a Repeat": (Population(Repeat([NODE, OTHER], 2)), "repeats several nodes"),
    "named nodes in a Repeat": (Population(Repeat({"a": NODE}, 2)), "repeats several nodes"),
    "a population in a Repeat": (Population(Repeat(Population({"a": NODE}), 2)), "repeats Pop"),
    "nobody in a Repeat": (Population(Repeat(NODE, 0)), "has most=0"),
    "half an agent": (Population(Repeat(NODE, 1.5)), "has most=1.5"),
    "most is a bool": (Population(Repeat(NODE, True)), "has most=True"),
    "too many": (Population(Repeat(NODE, 2**20)), "has most=1048576"),
    "a payoff nobody knows": (Population({"a": NODE}, payoff="win-win"), "payoff='win-win'"),
    "zero-sum alone": (Population({"a": NODE}, payoff="zero_sum"), "zero_sum with one agent"),
    "symmetric but different": (
        Population({"a": NODE, "b": OTHER}, symmetric=True),
        "is symmetric, but its agents differ (a, b)",
    ),
    "symmetric is no bool": (Population({"a": NODE}, symmetric=1), "symmetric=1"),
    "common is a space": (Population({"a": NODE}, common=BOX), "node 'common' is Box"),
    "common below the root": (
        Population({"x": Population({"a": NODE}, common=Obs(BOX))}),
        "node 'x' has common",
    ),
    "common legal actions": (Population({"a": NODE}, common=MASK), "'common' has legal_actions"),
    "common eval_only": (
        Population({"a": NODE}, common=Obs(BOX, eval_only=True)),
        "'common' is eval_only",
    ),
    "frames that are not there": (node_of(Obs(BOX, frame_stack=4)), "frame_stack=4 for Box"),
    "common of text": (Population({"a": NODE}, common=Obs(spaces.Text(3))), "node 'common'"),
    "an own part named common": (
        Population({"a": AgentNode({"common": Obs(BOX)}, Act(CHOICE))}, common=Obs(BOX)),
        "node 'a' observes 'common' of its own",
    ),
    "no observation": (node_of({}), "node 'a' observes nothing in obs"),
    "no observation below": (node_of({"x": {}}), "node 'a' observes nothing in obs['x']"),
    "an observation that is a space": (node_of(BOX), "node 'a' observes Box"),
    "an observation that is an action": (node_of(Act(BOX)), "node 'a' observes Act"),
    "a part that is a list": (node_of({"x": [1]}), "node 'a.x' observes [1]"),
    "a number for a part": (node_of({3: Obs(BOX)}), "observation name 3"),
    "a dot in a part": (node_of({"x.y": Obs(BOX)}), "observation name 'x.y'"),
    "a space that is a shape": (node_of(Obs((3,))), "node 'a' has space=(3,)"),
    "an observation of text": (node_of(Obs(spaces.Text(3))), "node 'a': observation_space"),
    "a tuple of spaces": (node_of({"x": Obs(spaces.Tuple([BOX]))}), "node 'a.x': observation"),
    "eval_only is no bool": (node_of(Obs(BOX, eval_only="yes")), "Obs.eval_only='yes'"),
    "legal_actions is no bool": (node_of(Obs(BOX, legal_actions=1)), "Obs.legal_actions=1"),
    "all is eval_only": (node_of(Obs(BOX, eval_only=True)), "that its policy can see"),
    "nothing but a mask": (node_of({"ok": MASK}), "that its policy can see"),
    "two masks": (node_of({"x": Obs(BOX), "m": MASK, "n": MASK}), "has 2 legal_actions (m, n)"),
    "a mask for a Box": (
        node_of({"x": Obs(BOX), "ok": MASK}, Act(BOX)),
        "node 'a' has legal_actions for Box",
    ),
    "a mask of another size": (
        node_of({"x": Obs(BOX), "ok": MASK}, Act(spaces.Discrete(4))),
        "use MultiBinary(4)",
    ),
    "a mask of numbers": (
        node_of({"x": Obs(BOX), "ok": Obs(BOX, legal_actions=True)}),
        "use MultiBinary(3)",
    ),
    "a mask that is a Dict": (
        node_of({"x": Obs(BOX), "ok": Obs(spaces.Dict({"m": CHOICE}), legal_actions=True)}),
        "node 'a.ok' has legal_actions that are a Dict",
    ),
    "a mask that is eval_only": (
        node_of(
            {
                "x": Obs(BOX),
                "ok": Obs(spaces.MultiBinary(3), eval_only=True, legal_actions=True),
            }
        ),
        "legal_actions that are eval_only",
    ),
    "no action": (Population({"a": AgentNode(Obs(BOX), None)}), "node 'a' has act=None"),
    "an action that is a space": (Population({"a": AgentNode(Obs(BOX), CHOICE)}), "has act=Disc"),
    "an eval_only action": (
        Population({"a": AgentNode(Obs(BOX), Obs(CHOICE, eval_only=True))}),
        "node 'a' has an eval_only action",
    ),
    "an action of bits": (node_of(act=Act(spaces.MultiBinary(3))), "node 'a': action_space"),
    "an action of whole numbers": (
        node_of(act=Act(spaces.Box(0, 3, (2,), np.int32))),
        "node 'a': action_space",
    ),
    "an action that is a number": (node_of(act=Act(3)), "node 'a' has the action 3"),
    "an action without parts": (node_of(act=Act({})), "has an action without parts"),
    "a mixed action": (node_of(act=Act({"x": CHOICE, "y": BOX})), "several kinds (x=Discrete"),
    "a number for a part of an action": (node_of(act=Act({1: CHOICE})), "action name 1"),
    "non_atomic is no bool": (node_of(act=Act({"x": BOX}, non_atomic=1)), "Act.non_atomic=1"),
    "non_atomic without parts": (node_of(act=Act(CHOICE, non_atomic=True)), "of one space"),
    "non_atomic with a mask": (
        node_of({"x": Obs(BOX), "ok": MASK}, Act({"p": CHOICE}, non_atomic=True)),
        "has legal_actions (ok) for a non_atomic action",
    ),
    "a lone node that is not atomic": (
        AgentNode(Obs(BOX), Act({"p": CHOICE, "q": CHOICE}, non_atomic=True)),
        "put the node into a Population",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_tree_is_refused_by_the_name_of_its_node(kind):
    tree, words = BAD[kind]
    with pytest.raises(UsageError) as raised:
        compile_tree(tree)
    assert words in str(raised.value)


def test_describe_refuses_what_is_no_tree():
    with pytest.raises(UsageError, match="takes a tree or the spec"):
        describe(3)


def test_a_spec_can_be_compared():
    assert compile_tree(node_of()) == compile_tree(node_of())
    assert compile_tree(node_of()) != compile_tree(Population({"b": NODE}))
    assert isinstance(compile_tree(node_of()).groups["a"], Group)
