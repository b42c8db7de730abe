"""Product names become words that people can write; what is alike has one word."""

from __future__ import annotations

import pytest

from rose_core.devices.classes import MIXED, class_of_all, device_class


@pytest.mark.parametrize(
    ("product", "word"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm4-40gb"),
        ("Tesla T4", "tesla-t4"),
        ("static", "static"),
        ("", ""),
        ("N" * 99, "n" * 63),
    ],
)
def test_a_class_is_a_word_that_a_lease_may_name(product: str, word: str) -> None:
    assert device_class(product) == word


def test_a_replica_of_one_kind_has_its_class_and_an_unknown_gpu_makes_it_unknown() -> None:
    assert class_of_all(["NVIDIA H200", "NVIDIA H200"]) == "h200"
    assert class_of_all(["NVIDIA H200", "NVIDIA L4"]) == MIXED
    assert class_of_all(["NVIDIA H200", ""]) == ""
    assert class_of_all([]) == ""
