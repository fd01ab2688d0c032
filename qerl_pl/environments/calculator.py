"""A calculator as a tool: arithmetic by Python's syntax tree; no code is run."""

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

_LONGEST = 200
_MOST_BITS = 4096
_MOST_DIGITS = 20
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"sqrt": math.sqrt, "abs": abs, "round": round, "min": min, "max": max}
_COMMAS = re.compile(r"m(?:ax|in)\(\s*\d{1,3}(?:,[1-9]\d\d)+(?:\.\d+)?\s*\)|(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
"""Thousands separators; but in max(100,250) commas separate numbers, for of a single one there is no maximum."""
_SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-", "^": "**", "$": ""})
Number = int | float


class Calculator:
    """Environment with a calculator; the reward is that of the final answer."""

    def reset(self, **row: Any) -> None:
        """Begin a dialogue; a calculator has no state."""

    def calculate(self, expression: str) -> str:
        """Calculate an arithmetic expression.

        Args:
            expression: Numbers, parentheses, + - * / // % ** and sqrt, abs, round, min, max; such as (3 + 4.5) * 2.

        Returns:
            The result.
        """
        return number_text(evaluate(expression))


def evaluate(expression: str) -> Number:
    """The value of an arithmetic expression, in bounded time.

    Raises:
        ValueError: It is too long, no arithmetic, or has a number of more than 4096 bits or none that is real.
        ArithmeticError: It divides by zero or overflows.
        TypeError: A function has other arguments.
    """
    text = _COMMAS.sub(
        lambda match: match[0] if match[0][0] == "m" else match[0].replace(",", ""),
        expression.translate(_SIGNS).strip(),
    )
    if len(text) > _LONGEST:
        raise ValueError(f"an expression has up to {_LONGEST} characters; this has {len(text)}")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, MemoryError) as error:  # MemoryError: too deep for the parser
        raise ValueError(f"no arithmetic: {text!r}; write an expression such as (3 + 4.5) * 2") from error
    return _value(tree.body)


def number_text(value: Number) -> str:
    """A number in up to 12 digits, or all digits of an integer."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.AST) -> Number:
    """The value of a node of the syntax tree."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            result: Any = value
        case ast.BinOp(left, operation, right) if type(operation) in _OPERATORS:
            one, other = _value(left), _value(right)
            if isinstance(operation, ast.Pow):
                _check_power(one, other)
            result = _OPERATORS[type(operation)](one, other)
        case ast.UnaryOp(operation, operand) if type(operation) in _OPERATORS:
            result = _OPERATORS[type(operation)](_value(operand))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            values = [_value(argument) for argument in arguments]
            if name == "round" and len(values) == 2 and abs(values[1]) > _MOST_DIGITS:
                raise ValueError(f"round takes up to {_MOST_DIGITS} digits")
            result = _FUNCTIONS[name](*values)
        case _:
            raise ValueError(f"no arithmetic: {ast.unparse(node)}; write an expression such as (3 + 4.5) * 2")
    if isinstance(result, int) and result.bit_length() > _MOST_BITS:
        raise ValueError(f"a number of more than {_MOST_BITS} bits")
    if isinstance(result, complex) or (isinstance(result, float) and not math.isfinite(result)):
        raise ValueError(f"{ast.unparse(node)} is no real number")
    return result


def _check_power(base: Number, exponent: Number) -> None:
    """Refuse a power of integers before it takes long."""
    if isinstance(base, int) and isinstance(exponent, int) and exponent * base.bit_length() > 2 * _MOST_BITS:
        raise ValueError(f"a number of more than {_MOST_BITS} bits")
