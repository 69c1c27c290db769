// Principal components of vectors, by power iteration on their Gram matrix.

const ITERATIONS = 400;

const dot = (one, other) => {
  let sum = 0;
  for (let at = 0; at < one.length; at++) sum += one[at] * other[at];
  return sum;
};

// Subtract from a vector its parts along others, and scale it to length 1. Returns the length it had.
function normalise(vector, others) {
  for (const other of others) {
    const along = dot(vector, other);
    for (let at = 0; at < vector.length; at++) vector[at] -= along * other[at];
  }
  const length = Math.sqrt(dot(vector, vector));
  if (length > 0) for (let at = 0; at < vector.length; at++) vector[at] /= length;
  return length;
}

// Products of all pairs of the vectors, after subtraction of their mean.
function gram(vectors) {
  const mean = new Float64Array(vectors[0].length);
  for (const vector of vectors) for (let at = 0; at < mean.length; at++) mean[at] += vector[at] / vectors.length;
  const rows = vectors.map((vector) => Float64Array.from(vector, (value, at) => value - mean[at]));
  const found = rows.map(() => new Float64Array(rows.length));
  rows.forEach((row, at) => {
    for (let other = 0; other <= at; other++) found[at][other] = found[other][at] = dot(row, rows[other]);
  });
  return found;
}

// Project vectors onto their two directions of greatest variance. Returns points: [[x, y]], and shares: the parts of
// the variance in x and in y. The sign of a direction makes its point of greatest distance positive.
export function principal(vectors) {
  const products = gram(vectors), total = products.reduce((sum, row, at) => sum + row[at], 0);
  const points = vectors.map(() => [0, 0]), shares = [0, 0], found = [];
  for (let axis = 0; axis < 2 && total > 1e-12; axis++) {
    let along = Float64Array.from(vectors, (_, at) => Math.sin(at * 12.9898 + axis + 1)), value = 0;
    normalise(along, found);
    for (let step = 0; step < ITERATIONS; step++) {
      const next = Float64Array.from(products, (row) => dot(row, along));
      value = normalise(next, found);
      const same = dot(next, along);
      along = next;
      if (value < 1e-9 * total || same > 1 - 1e-14) break;
    }
    if (value < 1e-9 * total) break;
    const far = along.reduce((most, one) => (Math.abs(one) > Math.abs(most) * (1 + 1e-9) ? one : most), 0);
    const scale = Math.sign(far) * Math.sqrt(value);
    along.forEach((one, at) => { points[at][axis] = scale * one; });
    shares[axis] = value / total;
    found.push(along);
  }
  return { points, shares };
}
