"""Skip the fault tests, which take minutes, unless their mark is selected."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "faults" not in str(config.getoption("markexpr")):
        for item in items:
            if item.get_closest_marker("faults"):
                item.add_marker(pytest.mark.skip(reason="takes minutes; make test-flower-faults runs it"))
