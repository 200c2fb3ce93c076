"""Translates the syntax tree of a `compiled` function to LLVM instructions."""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir

from shmllm_kernels.cpu.language import (
    BOOL,
    BUILT_IN,
    Compiled,
    Emitted,
    NotInLanguage,
    View,
    as_same_type,
    as_value,
    compare,
    is_constant,
    negate,
    operate,
)
from shmllm_kernels.cpu.simd import INT64


def expand(builder: ir.IRBuilder, function: Compiled, arguments: Sequence[Any]) -> Any:
    """Emits the instructions of a call and returns its value."""
    if function.is_noinline:
        return _call_noinline(builder, function, arguments)
    return _Body(builder, function, arguments).expand()


def _call_noinline(builder: ir.IRBuilder, function: Compiled, arguments: Sequence[Any]) -> None:
    numbers = [x for x in arguments if not isinstance(x, str)]
    kinds = [x for x in arguments if isinstance(x, str)]
    name = ".".join([function.source.__module__, function.source.__qualname__, *kinds])
    callee = builder.module.globals.get(name)
    if callee is None:
        kind = ir.FunctionType(ir.VoidType(), [INT64] * len(numbers))
        callee = ir.Function(builder.module, kind, name)
        callee.linkage = "internal"
        callee.attributes.add("noinline")
        callee.attributes.add("nounwind")
        inside = ir.IRBuilder(callee.append_basic_block("entry"))
        given = iter(callee.args)
        _Body(
            inside, function, [x if isinstance(x, str) else next(given) for x in arguments]
        ).expand()
        inside.ret_void()
    builder.call(callee, [as_value(x) for x in numbers])


class _Body:
    """One inlined copy of a function's body.

    A name that is assigned in one place only stands for its value. All other names are memory on
    the stack, which LLVM turns into registers.
    """

    def __init__(self, builder: ir.IRBuilder, function: Compiled, arguments: Sequence[Any]) -> None:
        self.builder, self._function, self._tree = builder, function, function.tree
        self._memory: dict[str, ir.Value] = {}
        self._names: dict[str, Any] = {}
        self._reassigned = function.reassigned
        parameters = [argument.arg for argument in self._tree.args.args]
        if len(parameters) != len(arguments):
            raise NotInLanguage(f"{self._tree.name} takes {', '.join(parameters)}")
        for name, value in zip(parameters, arguments, strict=True):
            self._bind(name, value)

    def expand(self) -> Any:
        *begin, last = self._tree.body
        returns = [node for node in ast.walk(self._tree) if isinstance(node, ast.Return)]
        if isinstance(last, ast.Return) and len(returns) == 1:
            self._run(begin)
            with self._locating_errors(last):
                return None if last.value is None else self._value(last.value)
        if not returns:
            return self._run(self._tree.body)
        self._exit = self.builder.append_basic_block("exit")
        self._result: ir.Value | None = None
        self._run(self._tree.body)
        self._go_to(self._exit)
        self.builder.position_at_end(self._exit)
        return None if self._result is None else self.builder.load(self._result)

    # names

    def _new_memory(self, kind: ir.Type) -> ir.Value:
        with self.builder.goto_entry_block():
            return self.builder.alloca(kind)

    def _bind(self, name: str, value: Any) -> None:
        if name not in self._reassigned:
            self._names[name] = value
            return
        value = as_value(value)
        if name not in self._memory:
            self._memory[name] = self._new_memory(value.type)
        self.builder.store(value, self._memory[name])

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Tuple):
            for part, of_part in zip(target.elts, value, strict=True):
                self._assign(part, of_part)
        elif isinstance(target, ast.Subscript):
            self.builder.store(as_value(value), self._element_address(target))
        elif isinstance(target, ast.Name):
            self._bind(target.id, value)
        else:
            raise NotInLanguage(ast.unparse(target))

    def _element_address(self, node: ast.Subscript) -> ir.Value:
        view = self._value(node.value)
        if not isinstance(view, View):
            raise NotInLanguage(f"{ast.unparse(node.value)} is not an array of numbers")
        return view.at(self.builder, self._value(node.slice))

    # statements

    def _run(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            if self.builder.block.is_terminated:
                return
            method = getattr(self, f"_do_{type(statement).__name__}", None)
            with self._locating_errors(statement):
                if method is None:
                    raise NotInLanguage(ast.unparse(statement))
                method(statement)

    @contextlib.contextmanager
    def _locating_errors(self, statement: ast.stmt) -> Iterator[None]:
        """Adds the place in the kernel's source to an error."""
        try:
            yield
        except Exception as error:
            if not hasattr(error, "__notes__"):
                path = inspect.getsourcefile(self._function.source)
                error.add_note(f"in a kernel, {path}:{statement.lineno}")
            raise

    def _go_to(self, block: ir.Block) -> None:
        if not self.builder.block.is_terminated:
            self.builder.branch(block)

    def _do_Expr(self, node: ast.Expr) -> None:
        self._value(node.value)

    def _do_Assign(self, node: ast.Assign) -> None:
        value = self._value(node.value)
        for target in node.targets:
            self._assign(target, value)

    def _do_AugAssign(self, node: ast.AugAssign) -> None:
        value = ast.BinOp(left=node.target, op=node.op, right=node.value)
        self._assign(node.target, self._value(value))

    def _do_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            value = as_value(self._value(node.value))
            if self._result is None:
                self._result = self._new_memory(value.type)
            self.builder.store(value, self._result)
        self.builder.branch(self._exit)

    def _do_If(self, node: ast.If) -> None:
        condition = self._condition(node.test)
        if is_constant(condition):
            return self._run(node.body if condition else node.orelse)
        then, otherwise, after = self._blocks("then", "otherwise", "after")
        self.builder.cbranch(condition, then, otherwise)
        for block, statements in ((then, node.body), (otherwise, node.orelse)):
            self.builder.position_at_end(block)
            self._run(statements)
            self._go_to(after)
        self.builder.position_at_end(after)
        return None

    def _blocks(self, *names: str) -> list[ir.Block]:
        return [self.builder.append_basic_block(name) for name in names]

    def _do_While(self, node: ast.While) -> None:
        test, body, after = self._blocks("test", "body", "after")
        self.builder.branch(test)
        self.builder.position_at_end(test)
        self.builder.cbranch(as_value(self._condition(node.test)), body, after)
        self.builder.position_at_end(body)
        self._run(node.body)
        self._go_to(test)
        self.builder.position_at_end(after)

    def _do_For(self, node: ast.For) -> None:
        call = node.iter
        if not isinstance(call, ast.Call) or self._value(call.func) is not range:
            raise NotInLanguage(ast.unparse(node))
        limits = [as_value(self._value(argument)) for argument in call.args]
        start, stop = limits[:2] if len(limits) > 1 else (as_value(0), limits[0])
        index = self._new_memory(INT64)
        self.builder.store(start, index)
        test, body, after = self._blocks("test", "body", "after")
        self.builder.branch(test)
        self.builder.position_at_end(test)
        goes_on = self.builder.icmp_signed("<", self.builder.load(index), stop)
        self.builder.cbranch(goes_on, body, after)
        self.builder.position_at_end(body)
        now = self.builder.load(index)  # in the body: LLVM then rejects a use after the loop
        self._assign(node.target, now)
        self._run(node.body)
        if not self.builder.block.is_terminated:
            step = limits[2] if len(limits) > 2 else as_value(1)
            self.builder.store(self.builder.add(now, step, flags=["nsw"]), index)
            self.builder.branch(test)
        self.builder.position_at_end(after)

    # expressions

    def _value(self, node: ast.expr) -> Any:
        method = getattr(self, f"_of_{type(node).__name__}", None)
        if method is None:
            raise NotInLanguage(ast.unparse(node))
        return method(node)

    def _condition(self, node: ast.expr) -> Any:
        value = self._value(node)
        if not is_constant(value) and value.type != BOOL:
            raise NotInLanguage(f"{ast.unparse(node)} is not a condition")
        return value

    def _of_Constant(self, node: ast.Constant) -> Any:
        return node.value

    def _of_Name(self, node: ast.Name) -> Any:
        if node.id in self._memory:
            return self.builder.load(self._memory[node.id])
        if node.id in self._names:
            return self._names[node.id]
        if node.id not in self._function.outer_names:
            raise NotInLanguage(f"{node.id} has no value yet")
        return self._function.outer_names[node.id]

    def _of_Attribute(self, node: ast.Attribute) -> Any:
        return getattr(self._value(node.value), node.attr)

    def _of_Tuple(self, node: ast.Tuple) -> Any:
        return tuple(self._value(part) for part in node.elts)

    def _of_Subscript(self, node: ast.Subscript) -> Any:
        return self.builder.load(self._element_address(node))

    def _of_BinOp(self, node: ast.BinOp) -> Any:
        a, b = self._value(node.left), self._value(node.right)
        return operate(self.builder, type(node.op), a, b, self._function.fastmath)

    def _of_UnaryOp(self, node: ast.UnaryOp) -> Any:
        if not isinstance(node.op, ast.USub):
            raise NotInLanguage(ast.unparse(node))
        return negate(self.builder, self._value(node.operand))

    def _of_Compare(self, node: ast.Compare) -> Any:
        if len(node.ops) != 1:
            raise NotInLanguage(ast.unparse(node))
        a, b = self._value(node.left), self._value(node.comparators[0])
        return compare(self.builder, type(node.ops[0]), a, b)

    def _of_BoolOp(self, node: ast.BoolOp) -> Any:
        first, *others = node.values
        rest = others[0] if len(others) == 1 else ast.BoolOp(op=node.op, values=others)
        is_or = isinstance(node.op, ast.Or)
        known = ast.Constant(value=is_or)
        return self._choose(first, known if is_or else rest, rest if is_or else known)

    def _of_IfExp(self, node: ast.IfExp) -> Any:
        return self._choose(node.test, node.body, node.orelse)

    def _choose(self, test: ast.expr, first: ast.expr, second: ast.expr) -> Any:
        condition = self._condition(test)
        if is_constant(condition):
            return self._value(first if condition else second)
        then, otherwise, after = self._blocks("then", "otherwise", "after")
        self.builder.cbranch(condition, then, otherwise)
        results = []
        for block, node in ((then, first), (otherwise, second)):
            self.builder.position_at_end(block)
            results.append((self._value(node), self.builder.block))
            self.builder.branch(after)
        self.builder.position_at_end(after)
        values = as_same_type(results[0][0], results[1][0])
        merged = self.builder.phi(values[0].type)
        for value, (_, block) in zip(values, results, strict=True):
            merged.add_incoming(value, block)
        return merged

    def _of_Call(self, node: ast.Call) -> Any:
        callee = self._value(node.func)
        arguments = [self._value(argument) for argument in node.args]
        if node.keywords:
            raise NotInLanguage(ast.unparse(node))
        if isinstance(callee, Emitted):
            numbers = [as_value(x) if isinstance(x, int) else x for x in arguments]
            return callee.emit(self.builder, *numbers)
        if isinstance(callee, Compiled):
            return expand(self.builder, callee, arguments)
        if callee in BUILT_IN:
            return BUILT_IN[callee](self.builder, *arguments)
        is_tuple = isinstance(callee, type) and issubclass(callee, tuple)
        if is_tuple or is_constant(*arguments):
            return callee(*arguments)
        raise NotInLanguage(ast.unparse(node))
