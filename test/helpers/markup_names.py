"""A model whose names would be markup and script, were they not escaped."""

from __future__ import annotations

NASTY = "</script ><script >document.title = 'taken'</script ><b>&amp;"

FUNCTION = "f</title><script>{{data}}"

MODEL = f"""
func.func @"{FUNCTION}"(%x: !pcg.tensor<[8, 4], f32>, %y: !pcg.tensor<[8, 4], f32>) -> !pcg.tensor<[], f32> {{
  %w = pcg.weight "{NASTY}" : !pcg.tensor<[4, 4], f32>
  %h = pcg.matmul %x, %w : !pcg.tensor<[8, 4], f32>, !pcg.tensor<[4, 4], f32>
  %loss = pcg.mse %h, %y : !pcg.tensor<[8, 4], f32>, !pcg.tensor<[8, 4], f32>
  func.return %loss : !pcg.tensor<[], f32>
}}
"""
