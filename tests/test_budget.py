"""The package stays within its budget, and the budget follows it down."""

from __future__ import annotations

from tests.support.budget import measure, read_budget

# Sizes that fall by less than this need no new budget.
_SLACK = 0.01


def test_the_package_is_within_its_budget() -> None:
    budget, sizes = read_budget(), measure()
    assert {name: set(rows) for name, rows in sizes.items()} == {
        name: set(rows) for name, rows in budget.items()
    }
    above = [
        f"{row} ({name}): {size:,}, the budget is {budget[name][row]:,}"
        for name, rows in sizes.items()
        for row, size in rows.items()
        if size > budget[name][row]
    ]
    assert above == [], "take something out, or raise tests/budget.yaml with the reason"


def test_the_budget_is_lowered_with_the_package() -> None:
    budget, sizes = read_budget()["statements"], measure()["statements"]
    spare = sum(budget.values()) - sum(sizes.values())
    assert spare <= _SLACK * sum(budget.values()), "python -m tests.support.budget lowers it"
