"""A model's chat template is a stranger's program: it makes a text, within a budget, or nothing."""

from __future__ import annotations

import resource
import time

import pytest

from rose_router.errors import BadRequest
from rose_router.http.tokenizer import templates
from rose_router.http.tokenizer.templates import Template

MESSAGES = [{"role": "user", "content": "hello\nthere"}]
DOUBLING = "{% set ns = namespace(a='xxxxxxxx') %}{% for i in range(60) %}"
DEEP = "{% set a = [[[1] * 9000] * 9000] * 9000 %}{% set b = [[[1] * 9000] * 9000] * 9000 %}"

HOSTILE = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "branches": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "sums": DOUBLING + "{% set ns.a = ns.a + ns.a %}{% endfor %}{{ ns.a }}",
    "concatenations": DOUBLING + "{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a }}",
    "lists": DOUBLING.replace("'xxxxxxxx'", "[1]") + "{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "times": "{{ 'x' * 99999 * 99999 * 99999 }}",
    "powers": "{{ 9 ** 9 ** 9 ** 9 }}",
    "products": "{% set ns = namespace(a=9) %}{% for i in range(60) %}"
    "{% set ns.a = ns.a * ns.a %}{% endfor %}{{ ns.a }}",
    "widths": "{{ '%9999999999d' % 1 }}",
    "widths by argument": "{{ '%*d' % (999999999, 1) }}",
    "formats": "{{ '{:>9999999999}'.format(1) }}",
    "format by filter": "{{ '%9999999999d' | format(1) }}",
    "paddings": "{{ 'x'.ljust(9999999999) }}",
    "paddings of numbers": "{{ 'x'.zfill(9999999999) }}",
    "tabs": "{{ '\t'.expandtabs(9999999999) }}",
    "center": "{{ 'x' | center(9999999999) }}",
    "indents": "{{ messages[0].content | indent(9999999999) }}",
    "json": "{{ messages | tojson(indent=9999999999) }}",
    "replacements": DOUBLING + "{% set ns.a = ns.a.replace('x', 'xxxxxxxx') %}{% endfor %}",
    "replacements by filter": DOUBLING + "{% set ns.a = ns.a|replace('x', 'xx') %}{% endfor %}",
    "joins": "{{ ['x' * 90000] | batch(90000, 'x' * 90000) | first | join('y' * 90000) }}",
    "joins by method": "{% set a = 'x' * 90000 %}{{ a.join([a] * 90000) }}",
    "blocks": DOUBLING
    + "{% set b %}{{ ns.a }}{{ ns.a }}{% endset %}{% set ns.a = b %}{% endfor %}",
    "sums of lists": "{{ [[1] * 9999] | sum(start=[]) }}",
    "insides": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "insides by filter": "{{ '' | attr('__class__') | string }}",
    "texts of lists": "{{ ['x' * 90000] * 90000 }}",
    "texts of nested lists": "{% set a = ['x' * 900] * 900 %}{{ [[a] * 900] * 900 }}",
    "texts of lists by filter": "{{ (['x' * 90000] * 90000) | string | length }}",
    "letters of lists": "{{ (['x' * 90000] * 90000) | upper | length }}",
    "texts of values": "{{ {'a': ['x' * 90000] * 90000}.values() }}",
    "texts of items": "{{ {'a': ['x' * 90000] * 90000}.items() }}",
    "texts of namespaces": "{% set ns = namespace(a=['x' * 90000] * 90000) %}{{ ns }}",
    "concatenations of lists": "{{ (['x' * 90000] * 90000) ~ 'y' }}",
    "joins of a text": "{{ ('x' * 90000).join('y' * 90000) | length }}",
    "joins of what comes one by one": "{{ ('x' * 90000).join(range(90000) | map('string')) }}",
    "joins of nested lists": "{{ [['x' * 90000] * 90000] | join }}",
    "many tabs": "{{ ('\t' * 90000).expandtabs(90000) | length }}",
    "tabs by name": "{{ ('\t' * 9).expandtabs(tabsize=99999999) | length }}",
    "widths inside": "{{ '{:>{a[w]}}'.format(1, a={'w': 999999999}) | length }}",
    "many widths": "{{ ('{0:90000}' * 90000).format(1) | length }}",
    "many widths of an old form": "{{ (('%(a)90000d' * 90000) % {'a': 1}) | length }}",
    "many widths by filter": "{{ ('%(a)90000d' * 90000) | format(a=1) | length }}",
    "one text often": "{{ (('%(a)s' * 90000) % {'a': 'x' * 90000}) | length }}",
    "one inner text often": "{{ ('{0[0]}' * 90000).format(['x' * 90000]) | length }}",
    "indents by a text": "{{ ('a\n' * 90000) | indent('x' * 90000) | length }}",
    "many lines of JSON": "{{ ([1] * 90000) | tojson(indent=90000) | length }}",
    "many parts of JSON": "{{ ([1] * 90000) | tojson(separators=('x' * 90000, ':')) | length }}",
    "deep JSON": "{{ ([([1] * 900)] * 900) | tojson(indent='x' * 900) | length }}",
    "JSON of nested lists": "{% set a = [1] * 9000 %}{{ ([[a] * 9000] * 9000) | tojson }}",
    "comparisons": DEEP + "{{ a == b }}",
    "containment": DEEP + "{{ a[0] in b }}",
    "comparisons by test": DEEP + "{{ a is eq(b) }}",
    "counts": DEEP + "{{ b.count(a[0]) }}",
    "sorted lists": DEEP + "{{ [a, b] | sort | length }}",
    "sorted letters": "{{ ('x' * 90000 * 600) | sort | length }}",
    "lines": "{{ ('xx\n' * 90000 * 200).splitlines() | length }}",
    "lorem ipsum": "{{ lipsum(n=99999999) | length }}",
    "ranges": "{{ range(9999999999) | list }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_makes_no_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "_SECONDS", 0.5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.thread_time()
    try:
        text = Template(HOSTILE[name]).render(messages=MESSAGES)
    except BadRequest:
        text = ""
    assert len(text) < 200
    assert time.thread_time() - began < 10 * 0.5
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 300 * 1024, "KiB: what the budget allows, and no more"


def test_what_models_templates_do_is_done() -> None:
    text = (
        "{%- for m in messages if m.role != 'system' -%}{{ '<' + m['role'] ~ '>' }}"
        "{{ m.content.split('\n')[-1].strip('t') | trim | upper }}{% endfor -%}"
        "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}"
        "{% endfor %}{{ ns.n }}{{ {'a': '<'} | tojson }}{{ '%s!' % 'x' }}{{ [1, 2] | join(', ') }}"
        "{{ 'a,b'.replace(',', ';') }}{{ ['x'] * 2 }}{{ messages | selectattr('role', 'equalto', "
        "'user') | list | length }}{{ '{}-{}'.format(1, 'b') }}{% generation %}g{% endgeneration %}"
        "{{ 'x' is string and m is not defined }}{{ messages[0].content | indent(2) }}"
    )
    made = Template(text).render(messages=MESSAGES)
    assert made == ("<user>HERE1{\"a\": \"<\"}x!1, 2a;b['x', 'x']11-bgTruehello\n  there")


def test_arguments_have_any_names() -> None:
    text = "{% set ns = namespace(called=1, context=2, self=3) %}{{ ns.called + ns.context }}"
    assert Template(text).render() == "3"


def test_a_long_conversation_is_well_within_the_budget() -> None:
    template = Template(
        "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}"
        "{% endfor %}"
    )
    long = [{"role": "user", "content": "x" * 1000} for _ in range(4000)]
    assert len(template.render(messages=long)) > 4_000_000
