// Passes of Llama models on a CPU, in float32, over weights that are stored in 16 bits. `packing.py` compiles and loads
// them.
//
// A packed weight (panels, in, P) has P outputs side by side, so that one stream of memory is read from beginning to
// end. In bfloat16 a 32-bit word holds two weights. Shifted left it is the float32 number of the first, masked the one
// of the second; the first of each word are outputs 0 to W - 1 of the panel, the second are outputs W to P - 1. In
// float16 outputs stand in their order.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int W = 16;
#else
constexpr int W = 8;
#endif
constexpr int P = 2 * W;
constexpr int BLOCK = 6;          // rows of x that share a read of a weight: their sums fit the registers
constexpr int AHEAD = 4096;       // bytes
constexpr int64_t ALONE = 65536;  // multiply-adds for which a second thread does not pay

typedef float Floats __attribute__((vector_size(4 * W)));
typedef uint32_t Words __attribute__((vector_size(4 * W)));

inline Floats load(const float* from) {
  Floats to;
  std::memcpy(&to, from, sizeof to);
  return to;
}

// The weights of P outputs for one input: of outputs 0 to W - 1 and of the others.
template <bool half>
inline void widen(const uint16_t* from, Floats& first, Floats& second) {
  if constexpr (half) {
#if defined(__AVX512F__)
    first = (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    second = (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + W)));
#elif defined(__F16C__)
    first = (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    second = (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + W)));
#else
    typedef _Float16 Halves __attribute__((vector_size(2 * W)));
    Halves halves[2];
    std::memcpy(halves, from, sizeof halves);
    first = __builtin_convertvector(halves[0], Floats);
    second = __builtin_convertvector(halves[1], Floats);
#endif
  } else {
    Words two;
    std::memcpy(&two, from, sizeof two);
    first = (Floats)(two << 16);
    second = (Floats)(two & 0xffff0000u);
  }
}

// y (M, up to P) = x (M, in) times one panel. U sums run side by side where M is small, since each waits for its last.
template <bool half, int M, int U>
void tile(const float* x, const uint16_t* panel, float* y, int64_t in, int64_t outputs, int64_t stride) {
  Floats sums[U][M][2] = {};
  auto step = [&](int64_t i, int u) {
    Floats first, second;
    widen<half>(panel + i * P, first, second);
    __builtin_prefetch(reinterpret_cast<const char*>(panel + i * P) + AHEAD);
    for (int m = 0; m < M; m++) {
      Floats one = x[m * in + i] - Floats{};  // in each place; adding zeros would be an operation
      sums[u][m][0] += one * first;
      sums[u][m][1] += one * second;
    }
  };
  int64_t i = 0;
  for (; i + U <= in; i += U)
    for (int u = 0; u < U; u++) step(i + u, u);
  for (; i < in; i++) step(i, 0);
  for (int m = 0; m < M; m++) {
    float every[P];
    for (int u = 1; u < U; u++)
      for (int part = 0; part < 2; part++) sums[0][m][part] += sums[u][m][part];
    std::memcpy(every, sums[0][m], sizeof every);
    std::memcpy(y + m * stride, every, outputs * sizeof(float));
  }
}

// y (rows, outputs) = x (rows, in) times a packed weight, plus a bias or nothing
template <bool half>
void times(const float* x, const at::Tensor& weight, const float* bias, float* y, int64_t rows, int64_t outputs) {
  const auto* panels = static_cast<const uint16_t*>(weight.const_data_ptr());
  const int64_t in = weight.size(1);
  const int64_t grain = std::max<int64_t>(1, ALONE / std::max<int64_t>(1, rows * in * P));
  at::parallel_for(0, weight.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; p++) {
      const uint16_t* panel = panels + p * in * P;
      const int64_t kept = std::min<int64_t>(P, outputs - p * P);
      float* out = y + p * P;
      int64_t a = 0;
      for (; a + BLOCK <= rows; a += BLOCK) tile<half, BLOCK, 1>(x + a * in, panel, out + a * outputs, in, kept, outputs);
      const float* rest = x + a * in;
      float* last = out + a * outputs;
      switch (rows - a) {
        case 1: tile<half, 1, 4>(rest, panel, last, in, kept, outputs); break;
        case 2: tile<half, 2, 3>(rest, panel, last, in, kept, outputs); break;
        case 3: tile<half, 3, 2>(rest, panel, last, in, kept, outputs); break;
        case 4: tile<half, 4, 1>(rest, panel, last, in, kept, outputs); break;
        case 5: tile<half, 5, 1>(rest, panel, last, in, kept, outputs); break;
      }
      if (bias)
        for (a = 0; a < rows; a++)
          for (int64_t o = 0; o < kept; o++) out[a * outputs + o] += bias[p * P + o];
    }
  });
}

void multiply(const float* x, const at::Tensor& weight, const float* bias, float* y, int64_t rows, int64_t outputs) {
  (weight.scalar_type() == at::kHalf ? times<true> : times<false>)(x, weight, bias, y, rows, outputs);
}

const float* numbers(const at::Tensor& tensor) { return tensor.numel() ? tensor.const_data_ptr<float>() : nullptr; }

at::Tensor packed(const at::Tensor& weight) {
  const int64_t out = weight.size(0), in = weight.size(1), panels = (out + P - 1) / P;
  auto result = at::empty({panels, in, P}, weight.options());
  const auto* from = static_cast<const uint16_t*>(weight.const_data_ptr());
  auto* to = static_cast<uint16_t*>(result.mutable_data_ptr());
  for (int64_t p = 0; p < panels; p++)
    for (int64_t i = 0; i < in; i++)
      for (int j = 0; j < P; j++) {
        const int64_t o = p * P + (weight.scalar_type() == at::kHalf ? j : j / 2 + (j % 2 ? W : 0));
        *to++ = o < out ? from[o * in + i] : 0;
      }
  return result;
}

at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, int64_t outputs) {
  auto rows = x.contiguous();
  auto shape = x.sizes().vec();
  shape.back() = outputs;
  auto y = at::empty(shape, x.options());
  if (y.numel())
    multiply(numbers(rows), weight, numbers(bias), y.data_ptr<float>(), y.numel() / outputs, outputs);
  return y;
}

// y = x over its root mean square, times weight (width,)
void norm(const float* x, const float* weight, float* y, int64_t width, double eps) {
  double squares = 0;
  for (int64_t begin = 0; begin < width; begin += 256) {  // short sums in float32 are exact enough
    float part = 0;
    for (int64_t i = begin; i < std::min(begin + 256, width); i++) part += x[i] * x[i];
    squares += part;
  }
  const float factor = 1 / std::sqrt(static_cast<float>(squares / width + eps));
  for (int64_t i = 0; i < width; i++) y[i] = weight[i] * (x[i] * factor);
}

// e^x within 2^-22 of it, 0 for x below -87, e^88 for x above 88: 2^whole e^rest, the latter by its series
inline Floats exp(Floats x) {
  typedef int32_t Whole __attribute__((vector_size(4 * W)));
  const Floats given = x;
  x = x < -87.f ? Floats{} - 87.f : x;
  x = x > 88.f ? Floats{} + 88.f : x;
  const Floats shifted = x * 1.44269504f + 12582912.f;  // 1.5 2^23: the sum's last bits are the nearest whole number
  const Floats whole = shifted - 12582912.f, rest = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;
  Floats sum = rest * (1 / 5040.f) + 1 / 720.f;
  sum = sum * rest + 1 / 120.f;
  sum = sum * rest + 1 / 24.f;
  sum = sum * rest + 1 / 6.f;
  sum = sum * rest + 0.5f;
  sum = sum * rest + 1.f;
  sum = sum * rest + 1.f;
  return given < -87.f ? Floats{} : sum * (Floats)((__builtin_convertvector(whole, Whole) + 127) << 23);
}

// f(x) of n numbers in place, W at a time
template <typename F>
void each_of(float* x, int64_t n, const F& f) {
  for (int64_t i = 0; i < n; i += W) {
    Floats some = {};
    const size_t bytes = sizeof(float) * std::min<int64_t>(W, n - i);
    std::memcpy(&some, x + i, bytes);
    some = f(some);
    std::memcpy(x + i, &some, bytes);
  }
}

float dot(const float* a, const float* b, int64_t n) {
  Floats sums = {};
  int64_t i = 0;
  for (; i + W <= n; i += W) sums += load(a + i) * load(b + i);
  for (int half = W / 2; half; half /= 2)
    for (int w = 0; w < half; w++) sums[w] += sums[w + half];
  float sum = sums[0];
  for (; i < n; i++) sum += a[i] * b[i];
  return sum;
}

// Decoder layers over x (A, n, width): returns the states after the layers in `wanted` (0: x; -1: after the last layer
// and the final norm), and writes keys and values to slots `written` (A, n). weights: 12 tensors a layer, empty ones
// for none, then the final norm. keys, values: a tensor (A, G, slots, size) a layer, contiguous but for its rows.
// beside, its_norm: if not empty, the first layer's attention reads the norm of beside (A, n, width), then that of x.
// cos, sin (A or 1, n, 1, size). mask (A, 1, n, read), added to the scores of the slots read; empty for none.
std::vector<at::Tensor> layers(
    const at::Tensor& given, const at::Tensor& beside, const at::Tensor& its_norm, at::TensorList weights, at::TensorList keys, at::TensorList values,
    const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& written, const at::Tensor& mask, int64_t read,
    int64_t heads, int64_t groups, int64_t size, double scale, double eps, at::IntArrayRef wanted) {
  constexpr int PARTS = 12;
  const int64_t A = given.size(0), n = given.size(1), width = given.size(2), N = A * n;
  const int64_t joined = (heads + 2 * groups) * size, each = heads / groups;
  const int64_t count = static_cast<int64_t>(weights.size()) / PARTS;
  const int64_t inner = count ? weights[10].size(1) : 0;
  const auto options = given.options();
  auto x_ = given.contiguous().clone();
  auto h_ = at::empty({N, 2 * width}, options), turned_ = at::empty({N, joined}, options);
  auto attended_ = at::empty({N, heads * size}, options), wide_ = at::empty({N, 2 * inner}, options);
  auto gated_ = at::empty({N, inner}, options), scores_ = at::empty({A, groups, read}, options);
  float *x = x_.data_ptr<float>(), *h = h_.data_ptr<float>(), *turned = turned_.data_ptr<float>();
  float *attended = attended_.data_ptr<float>(), *wide = wide_.data_ptr<float>(), *gated = gated_.data_ptr<float>();
  float* scores = scores_.data_ptr<float>();
  const auto beside_ = beside.contiguous(), cos_ = cos.contiguous(), sin_ = sin.contiguous(), written_ = written.contiguous(), mask_ = mask.contiguous();
  const float *c = numbers(cos_), *s = numbers(sin_), *seen = numbers(mask_);
  const auto* slots = written_.const_data_ptr<int64_t>();
  const int64_t shared = cos.size(0) == 1 ? 0 : n * size;  // one row of angles for all
  auto state = [&](int64_t layer) { return std::find(wanted.begin(), wanted.end(), layer) - wanted.begin(); };
  std::vector<at::Tensor> states(wanted.size());
  auto keep = [&](int64_t layer) {
    if (size_t at = state(layer); at < wanted.size()) states[at] = x_.clone();
  };
  auto rows = [&](const auto& each_row) {
    for (int64_t r = 0; r < N; r++) each_row(r);
  };
  auto add = [&](const float* more) {
    for (int64_t i = 0; i < N * width; i++) x[i] += more[i];
  };

  keep(0);
  for (int64_t layer = 0; layer < count; layer++) {
    const at::Tensor* w = weights.data() + layer * PARTS;
    const float* more = layer == 0 ? numbers(beside_) : nullptr;
    rows([&](int64_t r) {
      float* to = h + r * (more ? 2 * width : width);
      if (more) norm(more + r * width, numbers(its_norm), to, width, eps);
      norm(x + r * width, numbers(w[0]), more ? to + width : to, width, eps);
    });
    multiply(h, w[1], numbers(w[2]), turned, N, joined);
    float *k = keys[layer].data_ptr<float>(), *v = values[layer].data_ptr<float>();
    const int64_t length = keys[layer].size(2), row = keys[layer].stride(0);
    rows([&](int64_t r) {
      const int64_t a = r / n, j = r % n;
      const float *ca = c + a * shared + j * size, *sa = s + a * shared + j * size;
      float* states_of = turned + r * joined;
      std::vector<float> before(size);
      for (int64_t head = 0; head < heads + groups; head++) {
        float* t = states_of + head * size;
        const at::Tensor& of = w[head < heads ? 3 : 4];
        if (of.numel()) norm(t, numbers(of), t, size, eps);
        std::copy(t, t + size, before.begin());
        for (int64_t i = 0; i < size; i++) t[i] = before[i] * ca[i] + before[(i + size / 2) % size] * sa[i];
      }
      for (int64_t g = 0; g < groups; g++) {
        const int64_t to = a * row + (g * length + slots[r]) * size;
        std::copy_n(states_of + (heads + g) * size, size, k + to);
        std::copy_n(states_of + (heads + groups + g) * size, size, v + to);
      }
    });
    at::parallel_for(0, A * groups, std::max<int64_t>(1, ALONE / (each * n * read * size + 1)), [&](int64_t b, int64_t e) {
      for (int64_t one = b; one < e; one++) {
        const int64_t a = one / groups, g = one % groups, from = a * row + g * length * size;
        float* p = scores + one * read;
        for (int64_t j = 0; j < n; j++) {
          const float* visible = seen ? seen + (a * n + j) * read : nullptr;
          for (int64_t head = g * each; head < (g + 1) * each; head++) {
            const float* q = turned + (a * n + j) * joined + head * size;
            float* out = attended + ((a * n + j) * heads + head) * size;
            float most = -std::numeric_limits<float>::infinity(), sum = 0;
            for (int64_t l = 0; l < read; l++) {
              p[l] = dot(q, k + from + l * size, size) * static_cast<float>(scale) + (visible ? visible[l] : 0);
              most = std::max(most, p[l]);
            }
            each_of(p, read, [&](Floats score) { return exp(score - most); });
            for (int64_t l = 0; l < read; l++) sum += p[l];
            std::fill_n(out, size, 0.f);
            for (int64_t l = 0; l < read; l++) {
              const float share = p[l] / sum, *value = v + from + l * size;
              for (int64_t i = 0; i < size; i++) out[i] += share * value[i];
            }
          }
        }
      }
    });
    multiply(attended, w[5], numbers(w[6]), h, N, width);
    add(h);
    rows([&](int64_t r) { norm(x + r * width, numbers(w[7]), h + r * width, width, eps); });
    multiply(h, w[8], numbers(w[9]), wide, N, 2 * inner);
    rows([&](int64_t r) {
      const float* up = wide + (2 * r + 1) * inner;
      float* gate = gated + r * inner;
      std::copy_n(up - inner, inner, gate);
      each_of(gate, inner, [](Floats one) { return one / (exp(-one) + 1.f); });
      for (int64_t i = 0; i < inner; i++) gate[i] *= up[i];
    });
    multiply(gated, w[10], numbers(w[11]), h, N, width);
    add(h);
    keep(layer + 1);
  }
  if (size_t at = state(-1); at < wanted.size()) {
    states[at] = at::empty(x_.sizes(), options);
    float* last = states[at].data_ptr<float>();
    rows([&](int64_t r) { norm(x + r * width, numbers(weights.back()), last + r * width, width, eps); });
  }
  return states;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(inference, m) {
  m.def("packed(Tensor weight) -> Tensor");
  m.def("product(Tensor x, Tensor weight, Tensor bias, int outputs) -> Tensor");
  m.def(
      "layers(Tensor x, Tensor beside, Tensor its_norm, Tensor[] weights, Tensor(a!)[] keys, Tensor(b!)[] values, "
      "Tensor cos, Tensor sin, Tensor written, Tensor mask, int read, int heads, int groups, int size, float scale, "
      "float eps, int[] wanted) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(inference, CPU, m) {
  m.impl("packed", packed);
  m.impl("product", product);
  m.impl("layers", layers);
}
