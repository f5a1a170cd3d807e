"""The table of JSON Schema's keywords: what is accepted and rejected, or how it is refused."""

from typing import Any, NamedTuple

D4 = "http://json-schema.org/draft-04/schema#"
D7 = "http://json-schema.org/draft-07/schema#"
AB = {"a": {"type": "integer"}, "b": {"type": "string"}}
TREE = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}
CAT = {"type": "object", "properties": {"is": {"const": "cat"}}, "required": ["is"]}
DOG = {"type": "object", "properties": {"is": {"const": "dog"}, "n": True}, "required": ["is"]}


class Case(NamedTuple):
    name: str
    schema: Any
    accepted: list[Any] = []
    rejected: list[Any] = []
    verdict: str = "enforced"  # rewritten; strict: more is rejected than must be; format


class Refusal(NamedTuple):
    name: str
    schema: Any
    path: str
    code: str = "unsupported_schema"
    narrows: bool = True  # strict: false leaves it out


ENFORCED = [
    Case("type null", {"type": "null"}, [None], [0, "", False]),
    Case("type boolean", {"type": "boolean"}, [True, False], [0, "true", None]),
    Case("type integer", {"type": "integer"}, [0, -7, 10**15], [1.5, "1", True]),
    Case("type number", {"type": "number"}, [0, -7.25, 1e-9, 10**15], ["1", True]),
    Case("type string", {"type": "string"}, ["", 'é\n"\\', "\u0001"], [1, None]),
    Case("type array", {"type": "array"}, [[], [1, "a", [None]]], [{}, 1]),
    Case("type object", {"type": "object"}, [{}, {"a": [1]}], [[], 1]),
    Case("type list", {"type": ["string", "null"]}, ["a", None], [1, []]),
    Case("type integer and number", {"type": ["integer", "number"]}, [1, 1.5], ["1"]),
    Case("enum", {"enum": ["a", 1, None, True]}, ["a", 1, None, True], ["b", 2, False]),
    Case("enum of objects", {"enum": [{"a": [1]}, []]}, [{"a": [1]}, []], [{"a": [2]}, {}]),
    Case("enum and type", {"enum": ["a", 1], "type": "string"}, ["a"], [1]),
    Case("enum and maximum", {"enum": [1, 5, 9], "maximum": 5}, [1, 5], [9]),
    Case("const string", {"const": 'q"\\/é\u0001'}, ['q"\\/é\u0001'], ["q"]),
    Case("const number", {"const": 2.5}, [2.5], [2, 2.51]),
    Case("const object", {"const": {"a": 1}}, [{"a": 1}], [{"a": 2}, {}, {"a": 1, "b": 1}]),
    Case("const false", {"const": False}, [False], [0, None, True]),
    Case("const and enum", {"const": 1, "enum": [1, 2]}, [1], [2]),
    Case("minLength", {"type": "string", "minLength": 2}, ["ab", "éé"], ["a", ""]),
    Case("maxLength counts code points", {"maxLength": 2, "type": "string"}, ["😀é"], ["😀éa"]),
    Case("lengths as floats", {"type": "string", "minLength": 1.0, "maxLength": 2.0}, ["a"], [""]),
    Case("minLength of others", {"minLength": 3}, ["abc", 1, []], ["ab"]),
    Case("pattern", {"type": "string", "pattern": "^a+$"}, ["a", "aaa"], ["", "ba", "ab"]),
    Case("pattern unanchored", {"type": "string", "pattern": "b"}, ["b", "abc"], ["", "ac"]),
    Case("pattern with digits", {"type": "string", "pattern": r"^\d{2}$"}, ["12"], ["1", "ab"]),
    Case("pattern with options", {"type": "string", "pattern": "^a|b$"}, ["ax", "xb"], ["xa"]),
    Case(
        "pattern and lengths",
        {"type": "string", "pattern": "^a*$", "maxLength": 2},
        ["aa"],
        ["aaa", "b"],
    ),
    Case("pattern of a set", {"type": "string", "pattern": "^[a&&b-]$"}, ["&", "-"], ["c"]),
    Case("pattern, lazy", {"type": "string", "pattern": "^a*?b$"}, ["aab"], ["a"]),
    Case(
        "two patterns",
        {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}]},
        ["ab", "axb"],
        ["a", "b"],
    ),
    Case(
        "format date",
        {"type": "string", "format": "date"},
        ["2024-02-29", "2000-02-29", "0001-01-31"],
        ["2024-13-01", "2023-02-29", "1900-02-29", "2024-04-31", "0000-01-01"],
        "format",
    ),
    Case(
        "format date-time",
        {"type": "string", "format": "date-time"},
        ["2024-02-29T12:30:00Z", "2024-02-29T12:30:00.5+02:00"],
        ["2024-02-29 12:30"],
        "format",
    ),
    Case(
        "format time",
        {"type": "string", "format": "time"},
        ["12:30:00Z", "23:59:60Z"],
        ["25:00:00Z", "22:59:60Z"],
        "format",
    ),
    Case(
        "format duration",
        {"type": "string", "format": "duration"},
        ["P1Y2M", "PT5S"],
        ["1Y"],
        "format",
    ),
    Case("format email", {"type": "string", "format": "email"}, ["a@b.co"], ["a", "a@"], "format"),
    Case("format hostname", {"type": "string", "format": "hostname"}, ["a-b.co"], ["-a"], "format"),
    Case(
        "format ipv4", {"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["256.0.0.1"], "format"
    ),
    Case(
        "format ipv6",
        {"type": "string", "format": "ipv6"},
        ["::1", "1:2:3:4:5:6:7:8"],
        ["1::g"],
        "format",
    ),
    Case(
        "format uuid",
        {"type": "string", "format": "uuid"},
        ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"],
        ["2eb8aa08"],
        "format",
    ),
    Case(
        "format uri",
        {"type": "string", "format": "uri"},
        ["https://a.b/c?d#e"],
        ["a b", "//a"],
        "format",
    ),
    Case(
        "format and maxLength",
        {"type": "string", "format": "ipv4", "maxLength": 7},
        ["1.1.1.1"],
        ["127.0.0.1"],
    ),
    Case("minimum", {"type": "integer", "minimum": -3}, [-3, 0, 99], [-4]),
    Case("maximum", {"type": "number", "maximum": 2.5}, [2.5, -100, 0.1], [2.51, 3]),
    Case("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 1}, [1.5, 2], [1, 0]),
    Case("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 10}, [9, -1], [10, 11]),
    Case(
        "exclusiveMinimum near another bound",
        {"type": "number", "exclusiveMinimum": 0, "anyOf": [{"maximum": 0.5}, {"minimum": 3}]},
        [0.1, 0.5, 3],
        [0, 0.6],
    ),
    Case(
        "exclusiveMaximum near another bound",
        {"type": "number", "minimum": -99.5, "exclusiveMaximum": -99},
        [-99.5, -99.1],
        [-99, -99.6],
    ),
    Case(
        "bounds of draft 4",
        {"$schema": D4, "type": "integer", "minimum": 1, "exclusiveMinimum": True},
        [2],
        [1],
    ),
    Case(
        "bounds of 64 bits",
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        [0, -5, 10**17],
        [2**63],
    ),
    Case("a large bound", {"type": "number", "maximum": 1.7976931348623157e308}, [1, -2.5, 10**9]),
    Case("multipleOf", {"type": "integer", "multipleOf": 5}, [0, 5, -10], [1, 7]),
    Case("multipleOf of a fraction", {"type": "number", "multipleOf": 0.25}, [0.75, 2], [0.3]),
    Case(
        "two factors",
        {"type": "integer", "allOf": [{"multipleOf": 2}, {"multipleOf": 3}]},
        [6, 12],
        [2, 3],
    ),
    Case("items", {"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["a"], [1, "a"]]),
    Case("items false", {"type": "array", "items": False}, [[]], [[1]]),
    Case(
        "prefixItems",
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
        [[], [1], [1, "a"], [1, "a", None]],
        [["a"], [1, 2]],
    ),
    Case(
        "prefixItems and items",
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": False},
        [[], [1]],
        [[1, 2]],
    ),
    Case(
        "items as a list",
        {
            "$schema": D7,
            "type": "array",
            "items": [{"type": "integer"}],
            "additionalItems": {"type": "null"},
        },
        [[1, None]],
        [[1, 2], ["a"]],
    ),
    Case(
        "additionalItems beside a schema",
        {"$schema": D7, "type": "array", "items": {"type": "integer"}, "additionalItems": False},
        [[1, 2]],
        [["a"]],
    ),
    Case("minItems", {"type": "array", "minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]]),
    Case("maxItems", {"type": "array", "maxItems": 1}, [[], [1]], [[1, 2]]),
    Case("minItems of a billion", {"type": "array", "minItems": 10**9}, [], [[1]]),
    Case(
        "properties",
        {"type": "object", "properties": AB},
        [{}, {"a": 1, "b": "x"}, {"c": 1}],
        [{"a": "x"}, {"b": 1}],
    ),
    Case("properties of others", {"properties": AB}, [1, [], {"a": 1}], [{"a": "x"}]),
    Case(
        "required",
        {"type": "object", "properties": AB, "required": ["b"]},
        [{"b": "x"}, {"a": 1, "b": ""}],
        [{}, {"a": 1}],
    ),
    Case("required but not listed", {"type": "object", "required": ["x"]}, [{"x": 1}], [{}]),
    Case(
        "additionalProperties false",
        {"type": "object", "properties": AB, "additionalProperties": False},
        [{}, {"a": 1}],
        [{"c": 1}],
    ),
    Case(
        "additionalProperties",
        {"type": "object", "properties": AB, "additionalProperties": {"type": "null"}},
        [{"a": 1, "c": None}],
        [{"c": 1}],
    ),
    Case(
        "a property false",
        {"type": "object", "properties": {"a": False}},
        [{}, {"b": 1}],
        [{"a": 1}],
    ),
    Case(
        "patternProperties",
        {
            "type": "object",
            "patternProperties": {"^x-": {"type": "integer"}},
            "additionalProperties": False,
        },
        [{}, {"x-a": 1}],
        [{"x-a": "b"}, {"y": 1}],
    ),
    Case(
        "disjoint patternProperties",
        {
            "type": "object",
            "patternProperties": {"^a": {"type": "integer"}, "^b": {"type": "string"}},
        },
        [{"a": 1, "b": "x"}, {"c": []}],
        [{"a": "x"}, {"bb": 1}],
    ),
    Case(
        "patternProperties and properties",
        {
            "type": "object",
            "properties": {"ab": {"minimum": 3}},
            "patternProperties": {"^a": {"type": "integer"}},
        },
        [{"ab": 3}],
        [{"ab": 2}, {"ab": "x"}],
    ),
    Case(
        "a pattern of listed names alone",
        {
            "type": "object",
            "properties": {"a": {"minimum": 3}, "b": {}},
            "patternProperties": {"^(a|b)$": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        [{"a": 3}, {"a": 3, "b": 1}],
        [{"a": 2}, {"a": "x"}, {"a": 3, "b": "x"}, {"b": 1}, {"a": 3, "ab": 1}],
    ),
    Case(
        "a pattern of required names alone",
        {
            "type": "object",
            "patternProperties": {"^a$": {"type": "integer"}, "^b": {"type": "string"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        [{"a": 3}, {"a": 3, "bb": "x"}],
        [{}, {"a": "x"}, {"a": 3, "bb": 1}, {"a": 3, "c": 1}],
    ),
    Case(
        "a pattern of some listed names and others",
        {
            "type": "object",
            "properties": {"a": {}, "c": {}},
            "patternProperties": {"^[ab]$": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        [{"a": 3, "c": "x"}, {"a": 3, "b": 1}],
        [{"a": "x"}, {"a": 3, "b": "x"}, {"a": 3, "d": 1}],
    ),
    Case(
        "minProperties of a map",
        {"type": "object", "minProperties": 1, "additionalProperties": {"type": "integer"}},
        [{"a": 1}],
        [{}],
    ),
    Case(
        "maxProperties of a map",
        {"type": "object", "maxProperties": 1},
        [{}, {"a": 1}],
        [{"a": 1, "b": 1}],
    ),
    Case(
        "anyOf",
        {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]},
        [1, "a"],
        ["ab", None],
    ),
    Case(
        "anyOf and siblings",
        {"type": "object", "properties": AB, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": ""}],
        [{}],
    ),
    Case("anyOf with a dead option", {"anyOf": [False, {"type": "null"}]}, [None], [1]),
    Case("oneOf of types", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None]),
    Case(
        "oneOf by a constant",
        {"oneOf": [CAT, DOG]},
        [{"is": "cat"}, {"is": "dog", "n": 1}],
        [{"is": "cow"}, {}],
    ),
    Case(
        "oneOf of references",
        {"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}], "$defs": {"c": CAT, "d": DOG}},
        [{"is": "cat"}, {"is": "dog"}],
        [{"is": "cow"}],
    ),
    Case(
        "oneOf of ranges",
        {"type": "number", "oneOf": [{"maximum": 1}, {"minimum": 2}]},
        [0, 3],
        [1.5],
    ),
    Case(
        "oneOf beside anyOf",
        {
            "anyOf": [{"minimum": 5}, {"type": "string"}],
            "oneOf": [{"type": "integer"}, {"type": "string"}],
        },
        [5, "a"],
        [4],
    ),
    Case("allOf", {"allOf": [{"type": "integer"}, {"minimum": 3}]}, [3], [2, "a"]),
    Case(
        "allOf of objects",
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"properties": {"b": {"type": "null"}}, "required": ["b"]},
            ]
        },
        [{"a": 1, "b": None}],
        [{"a": 1}, {"a": 1, "b": 1}],
    ),
    Case(
        "$ref", {"$ref": "#/$defs/p", "$defs": {"p": {"type": "integer", "minimum": 1}}}, [1], [0]
    ),
    Case(
        "$ref and siblings",
        {"$ref": "#/$defs/p", "maximum": 3, "$defs": {"p": {"type": "integer", "minimum": 1}}},
        [1, 3],
        [0, 4],
    ),
    Case("$ref, recursive", TREE, [{}, {"kids": [{"kids": []}, {}]}], [{"kids": [1]}]),
    Case(
        "$ref through definitions",
        {
            "$schema": D7,
            "items": {"$ref": "#/definitions/p"},
            "definitions": {"p": {"type": "null"}},
        },
        [[None]],
        [[1]],
    ),
    Case(
        "$ref into properties",
        {"type": "object", "properties": {"a": {"type": "null"}, "b": {"$ref": "#/properties/a"}}},
        [{"a": None, "b": None}],
        [{"b": 1}],
    ),
    Case(
        "$ref with escapes",
        {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "null"}}},
        [None],
        [1],
    ),
    Case(
        "$ref to $anchor",
        {"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "null"}}},
        [None],
        [1],
    ),
    Case(
        "$ref through $id",
        {
            "$id": "http://x.y/s",
            "$ref": "other",
            "$defs": {"x": {"$id": "http://x.y/other", "type": "null"}},
        },
        [None],
        [1],
    ),
    Case("true", True, [1, "a", None, {}], []),
    Case("an empty schema", {}, [1, "a", None, {}], []),
    Case("an unreached definition", {"type": "null", "$defs": {"x": {"not": {}}}}, [None], [1]),
    Case(
        "annotations", {"title": "t", "default": 1, "nullable": True, "type": "null"}, [None], [1]
    ),
]

REWRITTEN = [
    Case("uniqueItems false", {"type": "array", "uniqueItems": False}, [[1, 1]], [1], "rewritten"),
    Case(
        "propertyNames",
        {
            "type": "object",
            "propertyNames": {"pattern": "^a"},
            "additionalProperties": {"type": "integer"},
        },
        [{}, {"ab": 1}],
        [{"b": 1}, {"a": "x"}],
        "rewritten",
    ),
    Case(
        "propertyNames and properties",
        {"type": "object", "properties": AB, "propertyNames": {"pattern": "^a"}},
        [{"a": 1}, {"ac": 0}],
        [{"b": "x"}, {"a": "x"}],
        "rewritten",
    ),
    Case(
        "propertyNames true",
        {"type": "object", "propertyNames": True},
        [{"b": 1}],
        [1],
        "rewritten",
    ),
    Case(
        "dependentRequired",
        {"type": "object", "properties": AB, "dependentRequired": {"a": ["b"]}},
        [{}, {"b": ""}, {"a": 1, "b": ""}],
        [{"a": 1}],
        "rewritten",
    ),
    Case(
        "dependentRequired of four",
        {
            "type": "object",
            "properties": {c: True for c in "abcd"},
            "additionalProperties": False,
            "dependentRequired": {"a": ["b"], "b": ["c"], "c": ["d"], "d": ["a"]},
        },
        [{}, dict.fromkeys("abcd", 1)],
        [{"a": 1}, {"a": 1, "b": 1}],
        "rewritten",
    ),
    Case(
        "dependencies of names",
        {"$schema": D7, "type": "object", "properties": AB, "dependencies": {"a": ["b"]}},
        [{}, {"a": 1, "b": ""}],
        [{"a": 1}],
        "rewritten",
    ),
    Case(
        "unevaluatedProperties false",
        {"type": "object", "properties": AB, "unevaluatedProperties": False},
        [{"a": 1}],
        [{"c": 1}],
        "rewritten",
    ),
    Case(
        "unevaluatedProperties true",
        {"allOf": [{"type": "object"}], "unevaluatedProperties": True},
        [{"c": 1}],
        [1],
        "rewritten",
    ),
    Case("then without if", {"type": "integer", "then": False}, [1], ["a"], "rewritten"),
    Case(
        "minContains without contains", {"type": "array", "minContains": 2}, [[]], [1], "rewritten"
    ),
    Case(
        "propertyNames beside values",
        {
            "type": "object",
            "properties": AB,
            "propertyNames": {"pattern": "a"},
            "additionalProperties": {"type": "null"},
        },
        [{"a": 1}, {"a": 1, "xa": None}],
        [{"b": ""}, {"xa": 1}, {"x": None}],
        "rewritten",
    ),
    Case(
        "propertyNames of a list",
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/names"},
            "additionalProperties": {"type": "integer"},
            "$defs": {"names": {"type": "string", "enum": ["a", "b"], "title": "Names"}},
        },
        [{}, {"a": 1}, {"a": 1, "b": 2}],
        [{"c": 1}, {"a": "x"}],
        "rewritten",
    ),
    Case(
        "oneOf of closed objects",
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {name: {"type": "integer"}},
                    "required": [name],
                    "additionalProperties": False,
                }
                for name in "ab"
            ]
        },
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}, {"a": "x"}],
        "rewritten",
    ),
    Case(
        "names in one form only", {"type": "object", "properties": AB}, [{"é": 1}], [], "rewritten"
    ),
]

STRICT = [
    Case("1.0 is no integer here", {"type": "integer"}, [1], [1.0], "strict"),
    Case("1.0 is no 1 here", {"const": 1}, [1], [1.0], "strict"),
    Case(
        "the order of properties",
        {"type": "object", "properties": AB},
        [{"a": 1, "b": "x"}],
        [{"b": "x", "a": 1}],
        "strict",
    ),
]

REFUSED = [
    Refusal("not", {"not": {"type": "null"}}, ".not"),
    Refusal("if then", {"if": {"type": "null"}, "then": True}, ".if"),
    Refusal("if else", {"if": {"type": "null"}, "else": True}, ".if"),
    Refusal("contains", {"type": "array", "contains": {"type": "null"}}, ".contains"),
    Refusal("contains with bounds", {"contains": True, "minContains": 2}, ".contains"),
    Refusal(
        "uniqueItems",
        {"properties": {"tags": {"type": "array", "uniqueItems": True}}},
        ".properties.tags.uniqueItems",
    ),
    Refusal("unevaluatedItems", {"type": "array", "unevaluatedItems": False}, ".unevaluatedItems"),
    Refusal(
        "unevaluatedProperties beside allOf",
        {"allOf": [{"properties": AB}], "unevaluatedProperties": False},
        ".unevaluatedProperties",
    ),
    Refusal(
        "dependentSchemas", {"dependentSchemas": {"a": {"required": ["b"]}}}, ".dependentSchemas"
    ),
    Refusal(
        "dependentRequired of five",
        {"dependentRequired": {c: ["x"] for c in "abcde"}},
        ".dependentRequired",
    ),
    Refusal(
        "dependencies of schemas", {"dependencies": {"a": {"required": ["b"]}}}, ".dependencies"
    ),
    Refusal("propertyNames of a length", {"propertyNames": {"maxLength": 3}}, ".propertyNames"),
    Refusal("propertyNames false", {"propertyNames": False}, ".propertyNames"),
    Refusal(
        "overlapping oneOf",
        {"items": {"oneOf": [{"type": "integer"}, {"minimum": 2}]}},
        ".items.oneOf",
    ),
    Refusal(
        "oneOf of open objects", {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, ".oneOf"
    ),
    Refusal("$dynamicRef", {"$dynamicRef": "#x"}, ".$dynamicRef", narrows=False),
    Refusal("$recursiveRef", {"$recursiveRef": "#"}, ".$recursiveRef", narrows=False),
    Refusal("remote $ref", {"$ref": "http://x.y/z"}, ".$ref", "invalid_schema", False),
    Refusal("look-ahead", {"pattern": "^(?=a)b"}, ".pattern"),
    Refusal("look-behind", {"pattern": "(?<!a)b"}, ".pattern"),
    Refusal("a back-reference", {"pattern": r"(a)\1"}, ".pattern"),
    Refusal("a word boundary", {"pattern": r"\bfoo"}, ".pattern"),
    Refusal("an anchor in the middle", {"pattern": "a^b"}, ".pattern"),
    Refusal("flags", {"pattern": "(?i)a"}, ".pattern"),
    *(
        Refusal(f"format {name}", {"format": name}, ".format")
        for name in "idn-email idn-hostname uri-reference iri iri-reference uri-template "
        "json-pointer relative-json-pointer regex".split()
    ),
    Refusal(
        "minProperties of optional ones",
        {"type": "object", "properties": AB, "minProperties": 1},
        ".minProperties",
    ),
    Refusal(
        "maxProperties of optional ones",
        {"type": "object", "properties": AB, "maxProperties": 1},
        ".maxProperties",
    ),
    Refusal(
        "minProperties of all",
        {"type": "object", "properties": AB, "minProperties": 2, "additionalProperties": False},
        ".minProperties",
    ),
    Refusal(
        "maxProperties of the required",
        {"type": "object", "properties": AB, "required": ["a"], "maxProperties": 1},
        ".maxProperties",
    ),
    Refusal("a constant beyond doubles", {"const": 2**53 + 1}, ".const", narrows=False),
    Refusal("a bound beyond 18 digits", {"minimum": 10**19}, ".minimum", narrows=False),
    Refusal("a factor of many digits", {"multipleOf": 1.23456789012e-3}, ".multipleOf"),
    Refusal("a factor of many remainders", {"multipleOf": 1_000_003}, ".multipleOf"),
    Refusal(
        "factors that overflow",
        {"multipleOf": 65537, "allOf": [{"multipleOf": 65539}]},
        ".multipleOf",
    ),
]
