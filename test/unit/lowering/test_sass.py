"""The step of a kernel's loop over matrix products, as the disassembler prints its code."""

from __future__ import annotations

import pytest

from unity_ir.lowering.measure.sass import Loop, loop_of_text, name_of

TEXT = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   ISETP.GE.AND P0, PT, R2, UR4, PT ;
        /*0020*/               @P0 BRA `(.L_x_9) ;
.L_x_1:
        /*0030*/                   SEL R7, RZ, 0x1, !P0 ;
        /*0040*/                   LDGSTS.E.BYPASS.128 [R9], desc[UR8][R4.64] ;
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0070*/              @!P1 BRA `(.L_x_2) ;
        /*0080*/                   FSEL R8, R8, RZ, P2 ;
        /*0090*/                   STG.E desc[UR8][R4.64], R8 ;
        /*00a0*/                   ISETP.NE.AND P2, PT, R8, RZ, PT ;
.L_x_2:
        /*00b0*/                   ISETP.NE.AND P3, PT, R8, RZ, PT ;
        /*00c0*/               @P3 BRA `(.L_x_1) ;
        /*00d0*/                   IADD3 R2, R2, 0x1, RZ ;
        /*00e0*/                   BRA `(.L_x_0) ;
.L_x_9:
        /*00f0*/                   EXIT ;
.L_x_10:
        /*0100*/                   BRA `(.L_x_10);
"""


def test_a_step_without_what_the_last_one_does() -> None:
    """Seven instructions, without what is skipped unless `P1`, and without the loop around it."""
    assert loop_of_text(TEXT) == Loop(instructions=7, matrix="HGMMA", selects=1, compares=1)


def test_a_block_that_all_steps_enter_counts() -> None:
    assert loop_of_text(TEXT.replace("@!P1 BRA `(.L_x_2)", "NOP")) == Loop(10, "HGMMA", 2, 2)


def test_matrix_instructions_outside_of_a_loop() -> None:
    assert loop_of_text(TEXT.replace("@P3 BRA `(.L_x_1)", "NOP").replace("BRA `(.L_x_0)", "EXIT")) is None
    assert loop_of_text(TEXT.replace("HGMMA", "FFMA")) is None


@pytest.mark.parametrize("text", ["@!P0 ISETP.GT.AND P1, PT, R3, RZ, PT", "@UP0 ISETP.NE P2, PT, R1", "ISETP P0, PT"])
def test_names_are_without_predicates(text: str) -> None:
    assert name_of(text) == "ISETP"
