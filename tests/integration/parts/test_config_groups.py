"""groups.py is what the table and the flat settings make."""

from __future__ import annotations

from tests import config_groups


def test_groups_are_what_the_table_and_the_flat_settings_make():
    """After a change of one of them, `python -m tests.config_groups` writes groups.py anew."""
    assert config_groups.groups() == (config_groups.PLACE / "groups.py").read_text()
