"""The mutations that are planted by hand still fit the code that they break, and name tests that are there."""

from __future__ import annotations

import re

import pytest

from tests.mutations import MUTATIONS, ROOT, mutate


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_changes_one_place_and_leaves_valid_python(mutation, tmp_path):
    source = (ROOT / mutation.file).read_text()
    file = tmp_path / mutation.file
    file.parent.mkdir(parents=True)
    file.write_text(source)
    mutate(mutation, tmp_path)
    assert file.read_text() != source
    compile(file.read_text(), mutation.file, "exec")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_tests_that_are_to_notice_a_mutation_are_there(mutation):
    for test in mutation.tests:
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text()
        assert re.search(rf"^def {name or 'test_'}", text, re.MULTILINE), test
