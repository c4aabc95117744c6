// Passes of Llama models on a CPU, with states and sums in float32, over weights that are stored in 16, 8 or 4 bits.
// `packing.py` compiles and loads them.
//
// A packed weight (panels, in, P) has P outputs side by side, so that one stream of memory is read from beginning to
// end. In bfloat16 a 32-bit word holds the weights of an output for two inputs. Shifted left it is the float32 number of
// the first, masked the one of the second. In int8 a 16-bit word holds two weights. They are multiplied by whole numbers
// of 16 bits, to which each row of x is rounded, and sums are whole numbers. Behind its weights, of inputs that are made
// even, such a panel has P float32 numbers, the scales of its outputs, and P more bytes if its inputs are odd. In 4 bits a
// word holds eight weights, 8 added to each: its bytes have those of four inputs below and of the next four above. They are
// multiplied by whole numbers of 8 bits, and each group of inputs has scales of its own, for the weights and for x.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <type_traits>
#include <vector>

#ifdef __AVX__
#include <immintrin.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int W = 16;
#else
constexpr int W = 8;
#endif
constexpr int P = 2 * W;
constexpr int BLOCK = W == 16 ? 12 : 6;
constexpr int FEW = W / 4;               // rows, half as many in 4 bits, for which memory takes longer than products: the CPU reads on by itself
constexpr int NEXT = 256;                // bytes: how far ahead weights are fetched for few rows
constexpr int AHEAD = 4096;              // bytes: for more
constexpr int SOON = 2048;               // bytes: into the first cache
constexpr int LATER = 16384;             // bytes: into the second, as long before as memory takes while rows are multiplied
constexpr size_t PAGE = 1 << 21;         // bytes of a large page of memory
constexpr size_t BLOCK_BYTES = 1 << 25;  // that packed weights share
constexpr int64_t ALONE = 65536;         // multiply-adds for which a second thread does not pay
constexpr float HIDDEN = -1e30f;         // a mask below it hides a slot
constexpr int SCALES = sizeof(float);    // rows of a panel in int8 that its scales take
constexpr int LARGEST = 127 * 257;       // of a rounded x, which is 256 times a signed byte plus another
constexpr int64_t TERMS = 512;           // of a sum of products with int8: TERMS * 127 * LARGEST is below 2^31
constexpr int64_t GROUP = 32;            // inputs of a weight in 4 bits that share a scale
constexpr int64_t GROUP_BYTES = GROUP / 2 + 2;  // of an output: its weights and a scale in bfloat16
constexpr int64_t GROUP_WORDS = GROUP / 4 + 2;  // of a rounded row of x: the bytes of its numbers, 8 times their sum, their scale

typedef float Floats __attribute__((vector_size(4 * W)));
typedef uint32_t Words __attribute__((vector_size(4 * W)));
typedef int32_t Whole __attribute__((vector_size(4 * W)));
typedef int16_t Shorts __attribute__((vector_size(4 * W)));

inline Floats load(const float* from) {
  Floats to;
  std::memcpy(&to, from, sizeof to);
  return to;
}

constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr float NEAREST = 12582912.f;  // 1.5 2^23: the last bits of its sum with a number are the nearest whole number

// W numbers of n; `missing` in the place of those that are not there
inline Floats some_of(const float* from, int64_t n, float missing = NONE) {
  if (n >= W) return load(from);
  Floats some = Floats{} + missing;
  std::memcpy(&some, from, n * sizeof(float));
  return some;
}

// bfloat16, float16, int8, groups of 4 bits; bfloat16 that is multiplied by bfloat16
enum Kind { BRAIN, HALF, BYTE, NIBBLE, ROUNDED };

template <Kind kind>
constexpr bool TWO = kind == BYTE || kind == ROUNDED;  // whether two rounded numbers of x are one word
template <Kind kind>
using Input = std::conditional_t<TWO<kind> || kind == NIBBLE, uint32_t, float>;
template <Kind kind>
using Sum = std::conditional_t<kind == BYTE, Whole, Floats>;

template <Kind kind>
constexpr int WIDTH = kind == BYTE ? 1 : 2;  // bytes of a weight
template <Kind kind>
constexpr int PAIR = kind == HALF ? 1 : 2;  // inputs whose weights stand together
template <Kind kind>
constexpr int ROWS = kind == NIBBLE ? BLOCK / 2 : BLOCK;  // rows of x that share a read of a weight: their sums fit the registers

// The weights of P outputs for one input of the PAIR at `from`: of outputs 0 to W - 1 and of the others.
template <Kind kind, int which>
inline void widen(const char* from, Floats& first, Floats& second) {
  if constexpr (kind == HALF) {
#if defined(__AVX512F__)
    first = (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    second = (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 2 * W)));
#elif defined(__F16C__)
    first = (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    second = (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * W)));
#else
    typedef _Float16 Halves __attribute__((vector_size(2 * W)));
    Halves halves[2];
    std::memcpy(halves, from, sizeof halves);
    first = __builtin_convertvector(halves[0], Floats);
    second = __builtin_convertvector(halves[1], Floats);
#endif
  } else {
    Words one, other;
    std::memcpy(&one, from, sizeof one);
    std::memcpy(&other, from + sizeof one, sizeof other);
    first = (Floats)(which ? one & 0xffff0000u : one << 16);
    second = (Floats)(which ? other & 0xffff0000u : other << 16);
  }
}

// The 16-bit numbers of W words, each two weights in int8
inline Whole widen(const char* from) {
#if defined(__AVX512BW__)
  return (Whole)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (Whole)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  typedef int8_t Bytes __attribute__((vector_size(2 * W)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return (Whole)__builtin_convertvector(bytes, Shorts);
#endif
}

// sum plus the products of two 16-bit numbers in each place
inline Whole dot(Whole sum, Whole one, Whole other) {
#if defined(__AVX512VNNI__)
  return (Whole)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)one, (__m512i)other);
#elif defined(__AVX512BW__)
  return sum + (Whole)_mm512_madd_epi16((__m512i)one, (__m512i)other);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return sum + (Whole)_mm256_madd_epi16((__m256i)one, (__m256i)other);
#else
  return sum + (one << 16 >> 16) * (other << 16 >> 16) + (one >> 16) * (other >> 16);
#endif
}

// y (M, up to P) = x (M, in) times one panel. scales (M,): of the rows of a rounded x, for int8. U sums run side by side
// where M is small, since each waits for its last.
template <Kind kind, int M, int U>
void tile(const Input<kind>* x, const float* scales, const char* panel, float* y, int64_t in, int64_t outputs, int64_t stride) {
  constexpr int N = PAIR<kind>;
  Sum<kind> sums[U][M][2] = {};
  Floats totals[M][2] = {};
  auto step = [&](int64_t i, int u) {
    const char* from = panel + i * N * P * WIDTH<kind>;
    if constexpr (kind == ROUNDED) {
#ifdef __AVX512BF16__
      const auto first = (__m512bh)_mm512_loadu_si512(from), second = (__m512bh)_mm512_loadu_si512(from + 4 * W);
      for (int part = 0; part < 2; part++) {
        __builtin_prefetch(from + (M > FEW ? SOON : NEXT) + part * 4 * W);
        if (M > FEW) __builtin_prefetch(from + LATER + part * 4 * W, 0, 2);
      }
      for (int m = 0; m < M; m++) {
        const auto one = (__m512bh)_mm512_set1_epi32(x[m * (in / N) + i]);
        sums[u][m][0] = (Floats)_mm512_dpbf16_ps((__m512)sums[u][m][0], one, first);
        sums[u][m][1] = (Floats)_mm512_dpbf16_ps((__m512)sums[u][m][1], one, second);
      }
#endif
    } else if constexpr (kind == BYTE) {
      const Whole first = widen(from), second = widen(from + 2 * W);
      __builtin_prefetch(from + (M > FEW ? AHEAD : NEXT));
      for (int m = 0; m < M; m++) {
        const Whole one = (Whole)(x[m * (in / N) + i] - Words{});  // in each place
        sums[u][m][0] = dot(sums[u][m][0], one, first);
        sums[u][m][1] = dot(sums[u][m][1], one, second);
      }
    } else {
      auto one_input = [&]<int which>() {
        Floats first, second;
        widen<kind, which>(from, first, second);
        __builtin_prefetch(from + (M > FEW ? AHEAD : NEXT) + which * P * WIDTH<kind>);
        for (int m = 0; m < M; m++) {
          Floats one = x[m * in + i * N + which] - Floats{};  // adding zeros would be an operation
          sums[u][m][0] += one * first;
          sums[u][m][1] += one * second;
        }
      };
      one_input.template operator()<0>();
      if constexpr (N > 1) one_input.template operator()<1>();
    }
  };
  auto add = [&] {
    for (int m = 0; m < M; m++)
      for (int part = 0; part < 2; part++) {
        Sum<kind> sum = sums[0][m][part];
        for (int u = 1; u < U; u++) sum += sums[u][m][part];
        totals[m][part] += __builtin_convertvector(sum, Floats);
        for (int u = 0; u < U; u++) sums[u][m][part] = Sum<kind>{};
      }
  };
  const int64_t steps = in / N, most = kind == BYTE ? TERMS / N : steps;
  for (int64_t i = 0; i < steps;) {
    const int64_t end = std::min(steps, i + most);
    for (; i + U <= end; i += U)
      for (int u = 0; u < U; u++) step(i + u, u);
    for (; i < end; i++) step(i, 0);
    add();
  }
  for (int m = 0; m < M; m++) {
    float every[P];
    if constexpr (kind == BYTE)
      for (int part = 0; part < 2; part++)
        totals[m][part] *= scales[m] * load(reinterpret_cast<const float*>(panel + in * P) + part * W);
    std::memcpy(every, totals[m], sizeof every);
    std::memcpy(y + m * stride, every, outputs * sizeof(float));
  }
}

// sum plus the products of four bytes from 0 to 15 and four signed bytes in each place. After up to eight of them, `joined`
// is the sum.
inline Whole quad(Whole sum, Words four, Words x) {
#if defined(__AVX512VNNI__)
  return (Whole)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)four, (__m512i)x);
#elif defined(__AVX512BW__)
  return (Whole)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)four, (__m512i)x));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (Whole)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)four, (__m256i)x));
#else
  for (int bits = 0; bits < 32; bits += 8) sum += (Whole)(four >> bits & 15) * ((Whole)(x << (24 - bits)) >> 24);
  return sum;
#endif
}

inline Words joined(Whole sum) {
#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
  return (Words)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (Words)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
#else
  return (Words)sum;
#endif
}

// `tile` of a panel in groups of 4 bits. x (M, in / GROUP * GROUP_WORDS)
template <int M>
void tile_in_groups(const uint32_t* x, const char* panel, float* y, int64_t in, int64_t outputs, int64_t stride) {
  Floats totals[M][2] = {};
  const int64_t groups = in / GROUP, width = groups * GROUP_WORDS;
  for (int64_t g = 0; g < groups; g++, panel += P * GROUP_BYTES, x += GROUP_WORDS) {
    Whole sums[M][2] = {};  // of both halves of the outputs
#pragma GCC unroll 4
    for (int eight = 0; eight < GROUP / 8; eight++) {
      Words both[2];
      std::memcpy(both, panel + eight * sizeof both, sizeof both);
      for (int part = 0; part < 2; part++) __builtin_prefetch(panel + eight * sizeof both + (M > FEW / 2 ? AHEAD : NEXT) + part * sizeof(Words));
#pragma GCC unroll 2
      for (int four = 0; four < 2; four++) {
        const Words first = both[0] >> 4 * four & 0x0f0f0f0fu, second = both[1] >> 4 * four & 0x0f0f0f0fu;
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
          const Words one = x[m * width + eight * 2 + four] - Words{};
          sums[m][0] = quad(sums[m][0], first, one);
          sums[m][1] = quad(sums[m][1], second, one);
        }
      }
    }
    Words scale;
    std::memcpy(&scale, panel + P * GROUP / 2, sizeof scale);
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) {
      const uint32_t* its = x + m * width + GROUP / 4;
      float its_scale;
      std::memcpy(&its_scale, its + 1, sizeof its_scale);
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++) {
        const Words sum = joined(sums[m][part]) - its[0];
        totals[m][part] += __builtin_convertvector((Whole)sum, Floats) * ((Floats)(part ? scale & 0xffff0000u : scale << 16) * its_scale);
      }
    }
  }
  for (int m = 0; m < M; m++) std::memcpy(y + m * stride, totals[m], outputs * sizeof(float));
}

inline int64_t even(int64_t n) { return n + n % 2; }

// Numbers x as whole numbers of at most `most`, which mean themselves times `scale`. It is NaN if one is not finite.
struct Rounding {
  float scale, factor;

  Rounding(const float* x, int64_t n, float most) {
    Floats largest = {}, nothing = {};
    for (int64_t i = 0; i < n; i += W) {
      Floats some = some_of(x + i, n - i, 0);
      nothing += some * 0.f;
      some = some < 0.f ? -some : some;
      largest = some > largest ? some : largest;
    }
    float top = 0, lost = 0;
    for (int w = 0; w < W; w++) top = std::max(top, largest[w]), lost += nothing[w];
    scale = top / most + lost;
    factor = top > 0 ? most / top : 0;
  }

  Whole operator()(Floats x) const { return (Whole)(x * factor + NEAREST) << 16 >> 16; }
};

template <typename T>
void narrow(Whole numbers, uint32_t* to, int64_t count) {
  typedef T Narrow __attribute__((vector_size(sizeof(T) * W)));
  const auto narrow = __builtin_convertvector(numbers, Narrow);
  std::memcpy(to, &narrow, count * sizeof(T));
}

// Rows of x, each of `in` numbers, as words of two whole numbers of 16 bits. The largest magnitude of a row becomes
// `LARGEST`. scales (rows,).
std::vector<uint32_t> in_pairs(const float* x, int64_t rows, int64_t in, std::vector<float>& scales) {
  std::vector<uint32_t> words(rows * even(in) / 2);
  for (int64_t r = 0; r < rows; r++, x += in) {
    const Rounding whole(x, in, LARGEST);
    scales.push_back(whole.scale);
    uint32_t* to = words.data() + r * even(in) / 2;
    for (int64_t i = 0; i < in; i += W)
      narrow<int16_t>(whole(some_of(x + i, in - i, 0)), to + i / 2, std::min<int64_t>(W, in - i));
  }
  return words;
}

// Rows of x for weights in 4 bits: for each group, words of four bytes of its numbers, then 8 times their sum and their
// scale. The largest magnitude of a group becomes 127.
std::vector<uint32_t> in_groups(const float* x, int64_t rows, int64_t in) {
  std::vector<uint32_t> words(rows * in / GROUP * GROUP_WORDS);
  uint32_t* to = words.data();
  for (int64_t g = 0; g < rows * in / GROUP; g++, x += GROUP, to += GROUP_WORDS) {
    const Rounding whole(x, GROUP, 127);
    Whole sums = {};
    for (int64_t i = 0; i < GROUP; i += W) {
      const Whole some = whole(load(x + i));
      sums += some;
      narrow<int8_t>(some, to + i / 4, W);
    }
    for (int w = 0; w < W; w++) to[GROUP / 4] += 8 * static_cast<uint32_t>(sums[w]);
    std::memcpy(to + GROUP / 4 + 1, &whole.scale, sizeof whole.scale);
  }
  return words;
}

#ifdef __AVX512BF16__
bool rounds = true;  // whether products over weights in bfloat16 round what they multiply to bfloat16

// n numbers, of an even count, as words of two numbers in bfloat16
std::vector<uint32_t> rounded(const float* x, int64_t n) {
  std::vector<uint32_t> to(n / 2);
  for (int64_t i = 0; i < n; i += W) {
    const auto some = static_cast<__mmask16>(n - i < W ? (1 << (n - i)) - 1 : -1);
    const auto words = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(some, x + i));
    _mm256_mask_storeu_epi16(to.data() + i / 2, some, words);
  }
  return to;
}
#endif

// Whether there are products that round what they multiply.
bool has_rounding() {
#ifdef __AVX512BF16__
  return true;
#endif
  return false;
}

// Sets whether products round what they multiply, where that is faster. Returns what it was.
bool rounding(bool on) {
#ifdef __AVX512BF16__
  std::swap(on, rounds);
  return on;
#endif
  return false;
}

// `tile` of the first M of the rows, or of all if they are fewer. Up to three rows wait for their sums, so they have several.
template <Kind kind, int M>
void some_rows(
    const Input<kind>* x, const float* scales, const char* panel, float* y, int64_t in, int64_t outputs, int64_t stride, int64_t rows) {
  if constexpr (M > 0) {
    if (rows >= M) {
      if constexpr (kind == NIBBLE)
        tile_in_groups<M>(x, panel, y, in, outputs, stride);
      else
        tile<kind, M, M < 4 && kind != ROUNDED ? 5 - M : 1>(x, scales, panel, y, in, outputs, stride);
    } else
      some_rows<kind, M - 1>(x, scales, panel, y, in, outputs, stride, rows);
  }
}

int64_t inputs(const at::Tensor& weight) {
  const int64_t size = weight.size(1);
  if (weight.scalar_type() == at::kByte) return size / GROUP_BYTES * GROUP;
  return weight.scalar_type() == at::kChar ? size - SCALES - size % 2 * 2 : size;
}

// y (rows, outputs) = x (rows, in) times a packed weight, plus a bias or nothing. scales (rows,): those of `tile`.
template <Kind kind>
void times(
    const Input<kind>* x, const float* scales, const at::Tensor& weight, const float* bias, float* y, int64_t rows, int64_t outputs) {
  const auto* panels = static_cast<const char*>(weight.const_data_ptr());
  const int64_t in = kind == BYTE ? even(inputs(weight)) : inputs(weight);
  const int64_t width = kind == NIBBLE ? in / GROUP * GROUP_WORDS : TWO<kind> ? in / 2 : in;  // words or numbers of a row of x
  const int64_t grain = std::max<int64_t>(1, ALONE / std::max<int64_t>(1, rows * in * P));
  at::parallel_for(0, weight.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; p++) {
      const char* panel = panels + p * weight.size(1) * P * weight.element_size();
      const int64_t kept = std::min<int64_t>(P, outputs - p * P);
      float* out = y + p * P;
      int64_t a = 0;
      for (; a < rows; a += ROWS<kind>)
        some_rows<kind, ROWS<kind>>(x + a * width, scales + a, panel, out + a * outputs, in, kept, outputs, rows - a);
      if (bias)
        for (a = 0; a < rows; a++)
          for (int64_t o = 0; o < kept; o++) out[a * outputs + o] += bias[p * P + o];
    }
  });
}

void multiply(const float* x, const at::Tensor& weight, const float* bias, float* y, int64_t rows, int64_t outputs) {
  const auto dtype = weight.scalar_type();
  const float* none = nullptr;
  if (dtype == at::kByte) return times<NIBBLE>(in_groups(x, rows, inputs(weight)).data(), none, weight, bias, y, rows, outputs);
  if (dtype == at::kChar) {
    std::vector<float> scales;
    const auto words = in_pairs(x, rows, inputs(weight), scales);
    return times<BYTE>(words.data(), scales.data(), weight, bias, y, rows, outputs);
  }
#ifdef __AVX512BF16__
  if (dtype == at::kBFloat16 && rounds)
    return times<ROUNDED>(rounded(x, rows * inputs(weight)).data(), none, weight, bias, y, rows, outputs);
#endif
  (dtype == at::kHalf ? times<HALF> : times<BRAIN>)(x, none, weight, bias, y, rows, outputs);
}

const float* numbers(const at::Tensor& tensor) { return tensor.numel() ? tensor.const_data_ptr<float>() : nullptr; }

#ifdef __linux__
// Zeros, in fresh pages of the system, large ones where it has them: pages that have been in use stay small.
std::shared_ptr<char> pages(size_t bytes) {
  const size_t whole = bytes + PAGE;
  void* raw = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(raw != MAP_FAILED, "packed: no memory for ", whole, " bytes");
  madvise(raw, whole, MADV_HUGEPAGE);
  char* begin = static_cast<char*>(raw) + (PAGE - reinterpret_cast<uintptr_t>(raw) % PAGE) % PAGE;
  return {begin, [raw, whole](char*) { munmap(raw, whole); }};
}
#endif

// Zeros, in large pages of memory where the system has them: with small ones a CPU waits for its table of pages. Small
// tensors share a block of pages, which lasts as long as one of them.
at::Tensor paged(at::IntArrayRef sizes, const at::TensorOptions& options) {
#ifdef __linux__
  static std::mutex alone;
  static std::weak_ptr<char> last;
  static size_t used = 0;
  const size_t bytes = c10::multiply_integers(sizes) * options.dtype().itemsize();
  if (bytes > BLOCK_BYTES) {
    const auto own = pages(bytes);
    return at::from_blob(own.get(), sizes, [own](void*) {}, options);
  }
  const std::lock_guard<std::mutex> lock(alone);
  auto block = last.lock();
  if (!block || used + bytes > BLOCK_BYTES) {
    last = block = pages(BLOCK_BYTES);
    used = 0;
  }
  char* at = block.get() + used;
  used += (bytes + 63) / 64 * 64;
  return at::from_blob(at, sizes, [block](void*) {}, options);
#else
  return at::zeros(sizes, options);
#endif
}

// Whole numbers (out, in) from -8 to 7 as panels in 4 bits. scale (out, in / GROUP): of each group of inputs.
at::Tensor packed_in_groups(const at::Tensor& weight, const at::Tensor& scale) {
  const int64_t out = weight.size(0), in = weight.size(1), panels = (out + P - 1) / P, groups = in / GROUP;
  TORCH_CHECK(in % GROUP == 0, "packed: a weight in 4 bits needs a multiple of ", GROUP, " inputs, not ", in);
  TORCH_CHECK(scale.size(0) == out && scale.size(1) == groups, "packed: scales of other groups: ", scale.sizes());
  auto result = paged({panels, groups * GROUP_BYTES, P}, weight.options().dtype(at::kByte));
  const auto *from = weight.const_data_ptr<int8_t>();
  const auto scales = scale.to(at::kBFloat16).contiguous();
  const auto* bits = static_cast<const uint16_t*>(scales.const_data_ptr());
  for (int64_t o = 0; o < out; o++) {
    const int64_t half = o % P / W;
    for (int64_t g = 0; g < groups; g++) {
      auto* group = result.mutable_data_ptr<uint8_t>() + (o / P * groups + g) * P * GROUP_BYTES;
      for (int64_t i = 0; i < GROUP; i++)
        group[(i / 8 * P + o % P) * 4 + i % 4] |= ((from[o * in + g * GROUP + i] + 8) & 15) << i % 8 / 4 * 4;
      std::memcpy(group + GROUP * P / 2 + (o % W * 2 + half) * 2, bits + o * groups + g, 2);
    }
  }
  return result;
}

// A weight (out, in) as panels; `in` is even for bfloat16, which int16 stands for if x is never to be rounded. scale
// (out,): of a weight in int8, whose row o means scale[o] * weight[o]; (out, in / GROUP): of one in groups of 4 bits;
// else empty.
at::Tensor packed(const at::Tensor& weight, const at::Tensor& scale) {
  if (scale.dim() == 2) return packed_in_groups(weight, scale);
  const int64_t out = weight.size(0), in = weight.size(1), panels = (out + P - 1) / P, width = weight.element_size();
  const bool eight = weight.scalar_type() == at::kChar, pairs = weight.scalar_type() != at::kHalf;
  TORCH_CHECK(eight || !pairs || in % 2 == 0, "packed: a weight in bfloat16 needs an even number of inputs, not ", in);
  auto result = paged({panels, eight ? even(in) + SCALES + in % 2 : in, P}, weight.options());
  const auto* from = static_cast<const char*>(weight.const_data_ptr());
  auto* to = static_cast<char*>(result.mutable_data_ptr());
  for (int64_t p = 0; p < panels; p++) {
    const int64_t outputs = std::min<int64_t>(P, out - p * P);
    for (int64_t i = 0; i < in; i++)
      for (int64_t o = 0; o < outputs; o++) {
        const int64_t at = pairs ? (i / 2 * P + o) * 2 + i % 2 : i * P + o;
        std::memcpy(to + at * width, from + ((p * P + o) * in + i) * width, width);
      }
    if (eight) std::memcpy(to + even(in) * P, numbers(scale) + p * P, outputs * sizeof(float));
    to += result.size(1) * P * width;
  }
  return result;
}

inline float total(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#elif defined(__AVX__)  // the loop below becomes scalar operations
  __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
  float sum = 0;
  for (int w = 0; w < W; w++) sum += x[w];
  return sum;
#endif
}

// The totals of eight vectors, by a third of the operations of eight times `total`
inline void totals(const Floats* of, float* to) {
#if defined(__AVX512F__)
  auto pair = [&](int i) {
    const auto a = (__m512)of[i], b = (__m512)of[i + 1];
    return _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
  };
  auto four = [&](int i) {  // in each quarter a part of four totals
    const auto a = pair(i), b = pair(i + 2);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  };
  const auto a = four(0), b = four(4);
  const auto half = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  const auto whole = _mm512_add_ps(half, _mm512_shuffle_f32x4(half, half, 0xb1));
  _mm_storeu_ps(to, _mm512_castps512_ps128(whole));
  _mm_storeu_ps(to + 4, _mm512_extractf32x4_ps(whole, 2));
#elif defined(__AVX__)
  auto four = [&](int i) {  // in each half a part of four totals
    return _mm256_hadd_ps(_mm256_hadd_ps((__m256)of[i], (__m256)of[i + 1]), _mm256_hadd_ps((__m256)of[i + 2], (__m256)of[i + 3]));
  };
  const auto a = four(0), b = four(4);
  _mm256_storeu_ps(to, _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)));
#else
  for (int i = 0; i < 8; i++) to[i] = total(of[i]);
#endif
}

// y = x over its root mean square, times weight (width,)
void norm(const float* x, const float* weight, float* y, int64_t width, double eps) {
  double squares = 0;
  int64_t i = 0;
  while (i + W <= width) {  // short sums in float32 are exact enough
    Floats part = {};
    for (const int64_t end = std::min(width, i + 256); i + W <= end; i += W) part += load(x + i) * load(x + i);
    squares += total(part);
  }
  for (; i < width; i++) squares += x[i] * x[i];
  const float factor = 1 / std::sqrt(static_cast<float>(squares / width + eps));
  for (i = 0; i < width; i++) y[i] = weight[i] * (x[i] * factor);
}

// e^x within 2^-22 of it, 0 for x below -87, e^88 for x above 88: 2^whole e^rest, the latter by its series
inline Floats exp(Floats x) {
  const Floats given = x;
  x = x < -87.f ? Floats{} - 87.f : x;
  x = x > 88.f ? Floats{} + 88.f : x;
  const Floats shifted = x * 1.44269504f + NEAREST;
  const Floats whole = shifted - NEAREST, rest = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;
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
  int64_t i = 0;
  for (; i + W <= n; i += W) {  // a memcpy of a fixed size is one instruction, not a call
    const Floats some = f(load(x + i));
    std::memcpy(x + i, &some, sizeof some);
  }
  if (i == n) return;
  const Floats some = f(some_of(x + i, n - i, 0));
  std::memcpy(x + i, &some, (n - i) * sizeof(float));
}

// The largest of n numbers; NaN does not count
float largest(const float* x, int64_t n) {
  Floats most = Floats{} + NONE;
  for (int64_t i = 0; i < n; i += W) {
    const Floats some = some_of(x + i, n - i);
    most = some > most ? some : most;
  }
  float result = most[0];
  for (int w = 1; w < W; w++) result = std::max(result, most[w]);
  return result;
}

// A step from one of n things to another, modulo n, that comes to all, and every so many steps to things from everywhere
int64_t scattered(int64_t n) {
  int64_t step = std::max<int64_t>(1, n * 0.618);
  while (std::gcd(step, n) > 1) step++;
  return step;
}

constexpr int64_t PART = 32 * W;
constexpr float CLOSE = 9;  // logits below the largest that are computed again: less likely tokens have little mass

// x times a row, both of n numbers
template <typename T>
float inner(const float* x, const T* row, int64_t n) {
  float sums[W] = {}, sum = 0;
  int64_t i = 0;
  for (; i + W <= n; i += W)
    for (int w = 0; w < W; w++) sums[w] += x[i + w] * static_cast<float>(row[i + w]);
  for (; i < n; i++) sum += x[i] * static_cast<float>(row[i]);
  for (const float one : sums) sum += one;
  return sum;
}

// In logits (R, V) over a weight in 4 bits, replaces those near the largest of each row by x (R, in) times the rows of the
// weight itself, `exact` (V, in).
void rescore(const at::Tensor& x, const at::Tensor& exact, at::Tensor& logits) {
  const int64_t V = exact.size(0), in = exact.size(1), R = logits.numel() / V, parts = (V + PART - 1) / PART;
  float* to = logits.data_ptr<float>();
  std::vector<float> least;
  for (int64_t r = 0; r < R; r++) least.push_back(largest(to + r * V, V) - CLOSE);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, exact.scalar_type(), "rescore", [&] {
    const auto* rows = exact.const_data_ptr<scalar_t>();
    const int64_t all = R * parts, step = scattered(all);  // the first tokens of most vocabularies are the likeliest
    at::parallel_for(0, all, 16, [&](int64_t begin, int64_t end) {
      for (int64_t one = begin; one < end; one++) {
        const int64_t at = one * step % all, r = at / parts, first = at % parts * PART;
        int64_t near[PART], count = 0;
        for (int64_t v = first; v < std::min(V, first + PART); v++) {
          near[count] = v;
          count += to[r * V + v] > least[r];
        }
        for (int64_t j = 0; j < count; j++) {
          const int64_t next = near[std::min(j + 2, count - 1)] * in;  // memory takes longer than a product
          for (int64_t i = 0; i < in; i += 64 / sizeof(scalar_t)) __builtin_prefetch(rows + next + i);
          to[r * V + near[j]] = inner(numbers(x) + r * in, rows + near[j] * in, in);
        }
      }
    });
  });
}

// x (..., in) times a packed weight, plus a bias or nothing. exact: as in `rescore`, or empty.
at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& exact, int64_t outputs) {
  auto rows = x.contiguous();
  auto shape = x.sizes().vec();
  shape.back() = outputs;
  auto y = at::empty(shape, x.options());
  if (!y.numel()) return y;
  multiply(numbers(rows), weight, numbers(bias), y.data_ptr<float>(), y.numel() / outputs, outputs);
  if (exact.numel()) rescore(rows, exact, y);
  return y;
}

constexpr double NEAR = 1e-4;  // relative error of a sum in float32 over a vocabulary, at most
constexpr float FAR = 40;  // a nucleus with tokens so far below the likeliest ends by a sort

// to = logits (n,) in which the tail is -inf: the least likely tokens whose mass is at most the share `tail` of all.
// Returns false, with nothing in `to`, where equal logits or rounding decide.
bool cut_tail(const float* logits, float* to, int64_t n, double tail) {
  std::vector<float> tops, likely;  // the largest of each part; logits
  float most = NONE;
  for (int64_t begin = 0; begin < n; begin += PART) {
    tops.push_back(largest(logits + begin, std::min(PART, n - begin)));
    most = std::max(most, tops.back());
  }
  double whole = 0;
  for (int64_t begin = 0; begin < n; begin += PART) {
    Floats sums = {};
    for (int64_t i = begin; i < std::min(n, begin + PART); i += W) sums += exp(some_of(logits + i, n - i) - most);
    whole += total(sums);
  }
  if (!(whole > 0)) return false;  // there is no distribution
  const double least_mass = tail * whole;
  for (float below = 3; below < FAR; below += 3) {
    likely.clear();
    for (int64_t p = 0; p < static_cast<int64_t>(tops.size()); p++)
      for (int64_t i = p * PART; tops[p] > most - below && i < std::min(n, (p + 1) * PART); i++)
        if (logits[i] > most - below) likely.push_back(logits[i]);
    std::sort(likely.begin(), likely.end(), std::greater<float>());
    double rest = whole;  // the mass of the next token and of all that are less likely
    size_t kept = 0;
    for (; kept < likely.size() && rest > least_mass; kept++) {
      const double left = rest - std::exp(static_cast<double>(likely[kept] - most));
      if (left <= least_mass && std::min(rest - least_mass, least_mass - left) <= NEAR * least_mass) return false;
      rest = left;
    }
    if (!kept) return false;  // the tail is all
    if (rest > least_mass) continue;  // the nucleus has less likely tokens too
    const float least = likely[kept - 1];
    if (kept < likely.size() && likely[kept] == least) return false;
    for (int64_t i = 0; i < n; i++) to[i] = logits[i] >= least ? logits[i] : NONE;
    return true;
  }
  return false;
}

// Logits (R, V) in which the tail is -inf, as `distributions.keep_top_p` has it. tails (R,), double: the mass of each tail
// at most; 0 keeps all.
at::Tensor without_tail(const at::Tensor& given, const at::Tensor& tails_) {
  const auto logits = given.contiguous(), tails = tails_.contiguous();
  const int64_t R = logits.size(0), V = logits.size(1);
  auto result = at::empty_like(logits);
  const float* from = numbers(logits);
  float* to = result.mutable_data_ptr<float>();
  const double* tail = tails.const_data_ptr<double>();
  std::vector<char> known(R);
  at::parallel_for(0, R, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) known[r] = tail[r] > 0 && cut_tail(from + r * V, to + r * V, V, tail[r]);
  });
  for (int64_t r = 0; r < R; r++) {
    if (known[r]) continue;
    auto row = logits[r];
    if (tail[r] > 0) {
      const auto [ascending, order] = row.sort(-1);
      auto gone = ascending.softmax(-1).cumsum(-1).le(static_cast<float>(tail[r]));
      gone[V - 1] = false;
      row = row.masked_fill(at::zeros_like(gone).scatter(-1, order, gone), NONE);
    }
    result[r].copy_(row);
  }
  return result;
}

// p = the distribution of logits (n,) at a temperature, one-hot for 0, without the tail. Returns false, with no meaning in
// p, if there is none, or where `cut_tail` does not decide.
bool distribution(const float* logits, float* p, int64_t n, float temperature, double tail) {
  const float most = largest(logits, n), top = most / temperature;
  if (!std::isfinite(most)) return false;
  if (temperature == 0) {
    bool none = false;
    for (int64_t i = 0; i < n; i++) none |= logits[i] != logits[i];
    if (none) return false;
    std::fill(p, p + n, 0.f);
    p[std::find(logits, logits + n, most) - logits] = 1;
    return true;
  }
  if (temperature == 1)
    std::copy_n(logits, n, p);
  else
    for (int64_t i = 0; i < n; i++) p[i] = logits[i] / temperature;
  if (tail > 0 && !cut_tail(p, p, n, tail)) return false;
  double whole = 0;
  for (int64_t begin = 0; begin < n; begin += PART) {
    Floats sums = {};
    for (int64_t i = begin; i < std::min(n, begin + PART); i += W) {
      const Floats some = exp(some_of(p + i, n - i) - top);
      sums += some;
      if (i + W <= n)
        std::memcpy(p + i, &some, sizeof some);
      else
        std::memcpy(p + i, &some, (n - i) * sizeof(float));
    }
    whole += total(sums);
  }
  if (std::isnan(whole)) return false;
  const float share = static_cast<float>(1 / whole);
  for (int64_t i = 0; i < n; i++) p[i] *= share;
  return true;
}

// The first of n tokens whose cumulative mass is above u times the whole, or else the last with mass.
int64_t drawn(const float* mass, int64_t n, double u) {
  std::vector<double> sums;
  double whole = 0;
  for (int64_t begin = 0; begin < n; begin += PART) {
    const int64_t end = std::min(n, begin + PART);
    double four[4] = {};  // one sum would wait for itself
    int64_t i = begin;
    for (; i + 4 <= end; i += 4)
      for (int j = 0; j < 4; j++) four[j] += mass[i + j];
    for (; i < end; i++) four[0] += mass[i];
    sums.push_back(four[0] + four[1] + four[2] + four[3]);
    whole += sums.back();
  }
  double below = std::min(u * whole, whole * (1 - 0x1p-53));
  for (int64_t begin = 0; begin < n; begin += PART) {
    const double part = sums[begin / PART];
    int64_t last = -1;
    double sum = 0;
    for (int64_t i = begin; part > below && i < std::min(n, begin + PART); i++) {
      if (!(mass[i] > 0)) continue;
      sum += mass[last = i];
      if (sum > below) return i;
    }
    if (last >= 0) return last;
    below -= part;
  }
  for (n--; n > 0 && !(mass[n] > 0); n--) {
  }
  return n;
}

// rest = max(weight p - q, 0) of n tokens, or nothing if rest is null. Returns its sum.
double excess(const float* p, const float* q, float weight, float* rest, int64_t n) {
  double whole = 0;
  for (int64_t begin = 0; begin < n; begin += PART) {
    const int64_t end = std::min(n, begin + PART);
    Floats sums = {};
    int64_t i = begin;
    for (; i + W <= end; i += W) {
      Floats more = weight * load(p + i) - load(q + i);
      more = more > 0.f ? more : Floats{};
      sums += more;
      if (rest) std::memcpy(rest + i, &more, sizeof more);
    }
    for (; i < end; i++) {
      const float more = std::max(weight * p[i] - q[i], 0.f);
      whole += more;
      if (rest) rest[i] = more;
    }
    whole += total(sums);
  }
  return whole;
}

// The table of a round (`verification.RoundResult`) whose distributions depend on a temperature and top-p alone, by the
// rules of `verify/chain.py`; empty if some distribution is missing or `cut_tail` does not decide.
// logits (A, K + 1, V). q (A, K, V), or (A, 0, V) if every draft is certain. x (A, K): drafts. k (A,): how many each row
// has. temperature, tails (A,). u (A, K or more), next (A,): uniforms for the tests, and for the token after them. block:
// whether the rule is `block`.
at::Tensor verified(
    const at::Tensor& logits_, const at::Tensor& q_, const at::Tensor& x_, const at::Tensor& k_, const at::Tensor& temperature_,
    const at::Tensor& tails_, const at::Tensor& u_, const at::Tensor& next_, bool block) {
  const auto logits = logits_.contiguous(), q = q_.contiguous(), x = x_.contiguous(), ks = k_.contiguous();
  const auto temperature = temperature_.contiguous(), tails = tails_.contiguous(), u = u_.contiguous(), next = next_.contiguous();
  const int64_t A = logits.size(0), K = x.size(1), V = logits.size(2), columns = 6 + K;
  TORCH_CHECK(q.size(1) == K || !q.size(1), "verified: ", q.size(1), " distributions of ", K, " drafts");
  auto p = at::empty_like(logits);
  std::vector<char> known(A * (K + 1));
  float* of = p.mutable_data_ptr<float>();
  const float* given = numbers(logits);
  const double *temperatures = temperature.const_data_ptr<double>(), *tail = tails.const_data_ptr<double>();
  const auto* drafts = K ? x.const_data_ptr<int64_t>() : nullptr;
  const auto* lengths = ks.const_data_ptr<int64_t>();
  at::parallel_for(0, A * (K + 1), 1, [&](int64_t begin, int64_t end) {
    for (int64_t one = begin; one < end; one++) {
      const int64_t a = one / (K + 1);
      known[one] = one % (K + 1) > lengths[a] ||
                   distribution(given + one * V, of + one * V, V, static_cast<float>(temperatures[a]), tail[a]);
    }
  });
  for (int64_t a = 0; a < A; a++)
    for (int64_t i = 0; q.size(1) && i < lengths[a]; i++) known[a * (K + 1)] &= !std::isnan(numbers(q)[(a * K + i) * V]);
  if (!std::all_of(known.begin(), known.end(), [](char one) { return one; })) return at::empty({0}, x.options());
  for (int64_t a = 0; a < A; a++)
    for (int64_t i = 0; i < lengths[a]; i++)
      TORCH_CHECK(drafts[a * K + i] >= 0 && drafts[a * K + i] < V, "a draft is no id of the vocabulary: ", drafts[a * K + i]);
  auto table = at::empty({A, columns}, x.options());
  auto* to = table.mutable_data_ptr<int64_t>();
  const double *tests = u.const_data_ptr<double>(), *last = next.const_data_ptr<double>();
  at::parallel_for(0, A, 1, [&](int64_t begin, int64_t end) {
    for (int64_t a = begin; a < end; a++) {
      const int64_t k = lengths[a];
      float* row = of + a * (K + 1) * V;
      std::vector<float> certain(q.size(1) || !k ? 0 : V);
      int64_t sure = 0;
      auto drafted_from = [&](int64_t i) -> const float* {  // distribution of a draft
        if (q.size(1)) return numbers(q) + (a * K + i) * V;
        certain[sure] = 0;
        certain[sure = drafts[a * K + i]] = 1;
        return certain.data();
      };
      std::vector<float> w{1.f};
      int64_t n = 0;
      bool passes = true;  // whether all drafts so far did, under the rule `token`
      for (int64_t i = 1; i <= k; i++) {
        const int64_t token = drafts[a * K + i - 1];
        const float mass = row[(i - 1) * V + token], ratio = mass > 0 ? mass / drafted_from(i - 1)[token] : 0.f;
        w.push_back(w.back() > 0 ? std::min(w.back() * ratio, 1.f) : 0.f);
        float share = ratio;
        if (block && i < k) {
          const auto more = static_cast<float>(excess(row + i * V, drafted_from(i), w[i], nullptr, V));
          share = w[i] == 1 ? 1.f : more / (more + (1 - w[i]));
        } else if (block) {
          share = w[i];
        }
        passes = passes && tests[a * u.size(1) + i - 1] < share;
        if (block ? tests[a * u.size(1) + i - 1] < share : passes) n = i;
      }
      float* mass = row + n * V;
      if (n < k) {
        auto rest = std::vector<float>(V);
        if (excess(mass, drafted_from(n), block ? w[n] : 1.f, rest.data(), V) > 0) std::copy(rest.begin(), rest.end(), mass);
      }
      int64_t* line = to + a * columns;
      const int64_t found[6] = {n, drawn(mass, V, last[a]), k, 0, 0, n < k};
      std::copy_n(found, 6, line);
      std::copy_n(drafts + a * K, K, line + 6);
    }
  });
  return table;
}

constexpr int MOST = 4;  // queries that share a read of keys and values
constexpr int64_t SLOTS = 64;  // that a thread reads at once, for a part of a query's result
constexpr int64_t PARTS_OF_QUERIES = 4096;  // that wait to be added

// A query over some slots. q (size,). visible (slots,): added to the scores, or nothing. Its result there: out (size,), the
// sum of the values, each times e^(score - most), and the sum of these factors.
struct Query {
  const float* q;
  const float* visible;
  float* out;
  float most, sum;
};

// p (M, SLOTS) = q times keys (slots, size) from slot `from` on, for M queries and S slots at a time
template <int M, int S>
int64_t scores(const Query* of, float (*p)[SLOTS], const float* keys, int64_t from, int64_t slots, int64_t size) {
  for (; from + S <= slots; from += S) {
    const float* k = keys + from * size;
    Floats sums[8] = {};
    float every[8];
    int64_t i = 0;
    for (; i + W <= size; i += W)
      for (int l = 0; l < S; l++) {
        const Floats some = load(k + l * size + i);
        for (int m = 0; m < M; m++) sums[m * S + l] += load(of[m].q + i) * some;
      }
    totals(sums, every);
    for (int m = 0; m < M; m++)
      for (int l = 0; l < S; l++) {
        p[m][from + l] = every[m * S + l];
        for (int64_t rest = i; rest < size; rest++) p[m][from + l] += of[m].q[rest] * k[l * size + rest];
      }
  }
  return from;
}

// out = p times values (slots, size) from number i on, for M queries and R W numbers at a time
template <int M, int R>
int64_t average(const Query* of, const float (*p)[SLOTS], const float* values, int64_t i, int64_t slots, int64_t size) {
  for (; i + R * W <= size; i += R * W) {
    Floats sums[M][R] = {};
    for (int64_t l = 0; l < slots; l++)
      for (int r = 0; r < R; r++) {
        const Floats some = load(values + l * size + i + r * W);
        for (int m = 0; m < M; m++) sums[m][r] += p[m][l] * some;
      }
    for (int m = 0; m < M; m++) std::memcpy(of[m].out + i, sums[m], sizeof sums[m]);
  }
  return i;
}

// M queries over keys and values (slots, size) that they all read
template <int M>
void attend(Query* of, const float* keys, const float* values, int64_t slots, int64_t size, float scale) {
  float p[M][SLOTS];
  scores<M, 1>(of, p, keys, scores<M, 8 / M>(of, p, keys, 0, slots, size), slots, size);
  for (int m = 0; m < M; m++) {
    for (int64_t l = 0; l < slots; l++) p[m][l] = p[m][l] * scale + (of[m].visible ? of[m].visible[l] : 0);
    of[m].most = std::max(largest(p[m], slots), HIDDEN);  // if all are hidden, the sum is 0
    const int64_t whole = (slots + W - 1) / W * W;
    std::fill(p[m] + slots, p[m] + whole, NONE);
    Floats sums = {};
    each_of(p[m], whole, [&](Floats score) {
      const Floats share = exp(score - of[m].most);
      sums += share;
      return share;
    });
    of[m].sum = total(sums);
  }
  for (int64_t o = average<M, 1>(of, p, values, average<M, W / 4>(of, p, values, 0, slots, size), slots, size); o < size; o++)
    for (int m = 0; m < M; m++) {
      of[m].out[o] = 0;
      for (int64_t l = 0; l < slots; l++) of[m].out[o] += p[m][l] * values[l * size + o];
    }
}

// The queries of a pass, turned (A, n, joined): of each id `heads` queries, which a pass leaves rotated, `groups` keys and
// `groups` values, each (size,). seen (A, n, read): the mask, or nothing. ends (A n): behind the last slot that an id sees,
// of one or more.
struct Queries {
  const float* turned;
  int64_t A, n, joined, heads, groups, size, read;
  const float* seen;
  const std::vector<int64_t>& ends;
  float scale;
};

// attended (A, n, heads, size) = attention over keys and values, each (A, groups, S, size), rows `row` numbers apart.
// A unit is up to MOST queries that read the same keys and values. Threads share the slots of each: the parts of a query's
// result are the same for any number of threads, and are added in the same order.
void attention(const Queries& of, const float* keys, const float* values, int64_t row, int64_t length, float* attended) {
  const int64_t each = of.heads / of.groups, size = of.size, shares = of.n * each, parts = (of.read + SLOTS - 1) / SLOTS;
  const int64_t several = (shares + MOST - 1) / MOST, units = of.A * of.groups * several, step = scattered(of.A);
  const int64_t batch = std::min(units, std::max<int64_t>(1, PARTS_OF_QUERIES / (MOST * parts)));
  const std::unique_ptr<float[]> outs(new float[batch * MOST * parts * size]);
  std::vector<Query> queries(batch * MOST * parts);
  struct Unit {
    int64_t a, g, first, count;
  };
  auto unit_at = [&](int64_t unit) -> Unit {
    const int64_t first = unit % several * MOST;
    return {unit / several / of.groups * step % of.A, unit / several % of.groups, first, std::min<int64_t>(MOST, shares - first)};
  };
  auto place = [&](const Unit& unit, int64_t m) {  // of a query in `attended`
    return (unit.a * of.n + (unit.first + m) / each) * of.heads + unit.g * each + (unit.first + m) % each;
  };
  for (int64_t from = 0; from < units; from += batch) {
    const int64_t now = std::min(batch, units - from);
    const int64_t work = std::min<int64_t>(MOST, shares) * size;  // multiply-adds of a slot, by keys or by values
    at::parallel_for(0, now * parts, std::max<int64_t>(1, ALONE / (2 * work * std::min(SLOTS, of.read) + 1)), [&](int64_t b, int64_t e) {
      for (int64_t one = b; one < e; one++) {
        const int64_t part = one % parts, begin = part * SLOTS;
        const Unit unit = unit_at(from + one / parts);
        Query some[MOST];
        int64_t end = 0;
        for (int64_t m = 0; m < unit.count; m++) {
          const int64_t at = place(unit, m), r = at / of.heads;
          some[m] = {of.turned + r * of.joined + at % of.heads * size, of.seen ? of.seen + r * of.read + begin : nullptr,
                     outs.get() + ((one / parts * MOST + m) * parts + part) * size, 0, 0};
          end = std::max(end, of.ends[r]);
        }
        const int64_t slots = std::min(SLOTS, end - begin), first = unit.a * row + (unit.g * length + begin) * size;
        if (slots <= 0) continue;
        switch (unit.count) {
          case 1: attend<1>(some, keys + first, values + first, slots, size, of.scale); break;
          case 2: attend<2>(some, keys + first, values + first, slots, size, of.scale); break;
          case 3: attend<3>(some, keys + first, values + first, slots, size, of.scale); break;
          case 4: attend<4>(some, keys + first, values + first, slots, size, of.scale); break;
        }
        for (int64_t m = 0; m < unit.count; m++) queries[(one / parts * MOST + m) * parts + part] = some[m];
      }
    });
    at::parallel_for(0, now, std::max<int64_t>(1, ALONE / (parts * work)), [&](int64_t b, int64_t e) {
      for (int64_t one = b; one < e; one++) {
        const Unit unit = unit_at(from + one);
        for (int64_t m = 0; m < unit.count; m++) {
          const int64_t at = place(unit, m), count = (of.ends[at / of.heads] + SLOTS - 1) / SLOTS;
          const Query* its = queries.data() + (one * MOST + m) * parts;
          float most = HIDDEN, sum = 0, *out = attended + at * size;
          for (int64_t part = 0; part < count; part++) most = std::max(most, its[part].most);
          std::fill_n(out, size, 0.f);
          for (int64_t part = 0; part < count; part++) {
            const float share = std::exp(its[part].most - most);
            sum += its[part].sum * share;
            for (int64_t i = 0; i < size; i++) out[i] += its[part].out[i] * share;
          }
          for (int64_t i = 0; i < size; i++) out[i] /= sum;
        }
      }
    });
  }
}

// Decoder layers over x (A, n, width): returns the states after the layers in `wanted` (0: x; -1: after the last layer
// and the final norm), and writes keys and values to slots `written` (A, n). weights: 12 tensors a layer, empty ones
// for none, then the final norm. keys, values: a tensor (rows, G, slots, size) a layer, contiguous; x[a] is of row
// low + a.
// beside, its_norm: if not empty, the first layer's attention reads the norm of beside (A, n, width), then that of x.
// cos, sin (A or 1, n, 1, size). mask (A, 1, n, read), added to the scores of the slots read; empty for none.
std::vector<at::Tensor> layers(
    const at::Tensor& given, const at::Tensor& beside, const at::Tensor& its_norm, at::TensorList weights, at::TensorList keys, at::TensorList values,
    const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& written, const at::Tensor& mask, int64_t read, int64_t low,
    int64_t heads, int64_t groups, int64_t size, double scale, double eps, at::IntArrayRef wanted) {
  constexpr int PARTS = 12;
  const int64_t A = given.size(0), n = given.size(1), width = given.size(2), N = A * n;
  const int64_t joined = (heads + 2 * groups) * size;
  const int64_t count = static_cast<int64_t>(weights.size()) / PARTS;
  const int64_t inner = count ? inputs(weights[10]) : 0;
  const auto options = given.options();
  auto x_ = given.contiguous().clone();
  auto h_ = at::empty({N, 2 * width}, options), turned_ = at::empty({N, joined}, options);
  auto attended_ = at::empty({N, heads * size}, options), wide_ = at::empty({N, 2 * inner}, options);
  auto gated_ = at::empty({N, inner}, options);
  float *x = x_.data_ptr<float>(), *h = h_.data_ptr<float>(), *turned = turned_.data_ptr<float>();
  float *attended = attended_.data_ptr<float>(), *wide = wide_.data_ptr<float>(), *gated = gated_.data_ptr<float>();
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
    at::parallel_for(0, N, std::max<int64_t>(1, ALONE / (16 * width)), [&](int64_t b, int64_t e) {
      for (int64_t r = b; r < e; r++) each_row(r);
    });
  };
  std::vector<int64_t> ends(N, read);  // behind the last slot that a row sees
  for (int64_t r = 0; seen && r < N; r++)
    while (ends[r] > 1 && seen[r * read + ends[r] - 1] < HIDDEN) ends[r]--;
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
    const int64_t length = keys[layer].size(2), row = keys[layer].stride(0);
    float *k = keys[layer].data_ptr<float>() + low * row, *v = values[layer].data_ptr<float>() + low * row;
    rows([&](int64_t r) {
      const int64_t a = r / n, j = r % n;
      const float *ca = c + a * shared + j * size, *sa = s + a * shared + j * size;
      float* states_of = turned + r * joined;
      const int64_t half = size / 2;
      for (int64_t head = 0; head < heads + groups; head++) {
        float* t = states_of + head * size;
        const at::Tensor& of = w[head < heads ? 3 : 4];
        if (of.numel()) norm(t, numbers(of), t, size, eps);
        for (int64_t i = 0; i < half; i++) {
          const float first = t[i], second = t[i + half];
          t[i] = first * ca[i] + second * sa[i];
          t[i + half] = second * ca[i + half] + first * sa[i + half];
        }
      }
      for (int64_t g = 0; g < groups; g++) {
        const int64_t to = a * row + (g * length + slots[r]) * size;
        std::copy_n(states_of + (heads + g) * size, size, k + to);
        std::copy_n(states_of + (heads + groups + g) * size, size, v + to);
      }
    });
    attention({turned, A, n, joined, heads, groups, size, read, seen, ends, static_cast<float>(scale)}, k, v, row, length, attended);
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

// What a draft drafts in a round: K tokens a row, one after the other, (A, K), and their distributions (A, K, outputs)
// over the tokens of its head. The first pass reads ids (A, n) from position pairs[a] on, and for a draft over states
// (`proposers/eagle.py`) features (A, n, width) beside their embeddings; empty for a causal language model
// (`proposers/independent.py`). The first draft follows its column only[a].
// cos, sin (slots, 1, size): of all positions. head: packed. exact: as in `rescore`, or empty. known (outputs,): the ids of the head's tokens, or empty.
// u (A, K or more): uniforms. temperature (A,): above 0; empty for the likeliest tokens, with one-hot distributions. tails
// (A,): those of `without_tail`; empty for none.
// The other arguments are those of `layers`.
std::tuple<at::Tensor, at::Tensor> chain(
    const at::Tensor& ids, const at::Tensor& features, const at::Tensor& pairs, const at::Tensor& only, const at::Tensor& embedding,
    const at::Tensor& its_norm, at::TensorList weights, at::TensorList keys, at::TensorList values, const at::Tensor& cos,
    const at::Tensor& sin, const at::Tensor& head, const at::Tensor& exact, const at::Tensor& known, const at::Tensor& u, const at::Tensor& temperature,
    const at::Tensor& tails, int64_t K, int64_t read, int64_t outputs, int64_t heads, int64_t groups, int64_t size, double scale, double eps) {
  const auto slots = at::arange(read, ids.options());
  at::Tensor above, last;  // (A, 1, width): what the next pair reads, and what the head reads
  auto pass = [&](const at::Tensor& x, const at::Tensor& some, const at::Tensor& positions, const at::Tensor& column) {
    const int64_t A = some.size(0), n = some.size(1);
    auto angles = [&](const at::Tensor& of) { return of.index_select(0, positions.flatten()).view({A, n, 1, size}); };
    auto embedded = embedding.index_select(0, some.flatten()).to(at::kFloat).view({A, n, -1});
    auto mask = embedded.new_zeros({A, 1, n, read});
    mask.masked_fill_(slots > positions.view({A, 1, n, 1}), std::numeric_limits<float>::lowest());
    const bool over = x.numel();  // over states
    const auto none = at::empty({0}, mask.options());
    const std::vector<int64_t> wanted = over ? std::vector<int64_t>{1, -1} : std::vector<int64_t>{-1};
    auto states = layers(over ? x : embedded, over ? embedded : none, its_norm, weights, keys, values, angles(cos), angles(sin),
                         positions, mask, read, 0, heads, groups, size, scale, eps, wanted);
    const auto at = at::arange(0, A * n, n, ids.options()) + column;
    auto chosen = [&](const at::Tensor& of) { return of.flatten(0, 1).index_select(0, at).unsqueeze(1); };
    above = over ? chosen(states[0]) : x;
    last = chosen(states.back());
  };
  pass(features, ids, pairs.unsqueeze(1) + at::arange(ids.size(1), ids.options()), only);
  const int64_t A = ids.size(0);
  const auto u_ = u.to(at::kDouble).contiguous();
  const double* uniforms = u_.const_data_ptr<double>();
  std::vector<char> drawable(A);  // whether `distribution` knows the row's
  std::vector<float> heat(A);
  std::vector<double> cut(A);
  for (int64_t a = 0; a < A; a++) {
    heat[a] = temperature.numel() ? temperature[a].item<float>() : 0;
    cut[a] = tails.numel() ? tails[a].item<double>() : 0;
  }
  std::vector<at::Tensor> drafts, distributions;
  for (int64_t depth = 0; depth < K; depth++) {
    const auto logits = product(last, head, at::empty({0}, last.options()), exact, outputs).squeeze(1);
    auto probs = at::empty_like(logits), token = at::empty_like(only);
    const float* from = numbers(logits);
    float* p = probs.data_ptr<float>();
    at::parallel_for(0, A, 1, [&](int64_t begin, int64_t end) {
      for (int64_t a = begin; a < end; a++)
        drawable[a] = distribution(from + a * outputs, p + a * outputs, outputs, heat[a], cut[a]);
    });
    for (int64_t a = 0; a < A; a++) {
      if (drawable[a]) continue;
      auto row = logits.slice(0, a, a + 1) / (heat[a] > 0 ? heat[a] : 1);
      if (cut[a] > 0) row = without_tail(row, tails.slice(0, a, a + 1));
      probs.slice(0, a, a + 1).copy_(row.softmax(-1));  // NaN if it has none
    }
    at::parallel_for(0, A, 1, [&](int64_t begin, int64_t end) {
      for (int64_t a = begin; a < end; a++)
        token.data_ptr<int64_t>()[a] = drawn(p + a * outputs, outputs, uniforms[a * u_.size(1) + depth]);
    });
    drafts.push_back(known.numel() ? known.index_select(0, token) : token);
    distributions.push_back(probs);
    if (depth + 1 < K)
      pass(above, drafts.back().unsqueeze(1), (pairs + only + depth + 1).unsqueeze(1), at::zeros_like(only));
  }
  return {at::stack(drafts, 1), at::stack(distributions, 1)};
}

// A hash (1,) of the bytes of tensors: any change of one number changes it, and a move of some nearly always.
at::Tensor hash_of(at::TensorList given) {
  typedef uint64_t Longs __attribute__((vector_size(64)));
  constexpr int64_t SOME = 65536;  // bytes that a thread reads at once
  struct Part {
    const char* from;
    int64_t bytes;
    uint64_t sum;
  };
  auto mixed = [](auto x) { return (x << 7 | x >> 57) * 0x9e3779b97f4a7c15u; };  // one to one
  std::vector<at::Tensor> tensors;
  std::vector<Part> parts;
  for (const auto& tensor : given) tensors.push_back(tensor.contiguous());
  for (const auto& tensor : tensors)
    for (int64_t at = 0, all = tensor.nbytes(); at < all; at += SOME)
      parts.push_back({static_cast<const char*>(tensor.const_data_ptr()) + at, std::min(SOME, all - at), 0});
  at::parallel_for(0, parts.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; p++) {
      Longs sums[4] = {};
      for (int64_t at = 0; at < parts[p].bytes; at += sizeof sums) {
        Longs some[4] = {};
        std::memcpy(some, parts[p].from + at, std::min<int64_t>(sizeof sums, parts[p].bytes - at));
        for (int i = 0; i < 4; i++) sums[i] = mixed(sums[i]) ^ some[i];
      }
      for (const auto& each : sums)
        for (int i = 0; i < 8; i++) parts[p].sum = mixed(parts[p].sum) ^ each[i];
    }
  });
  uint64_t sum = 0;
  for (const auto& part : parts) sum = mixed(sum) ^ part.sum;
  return at::full({1}, static_cast<int64_t>(sum), at::kLong);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(inference, m) {
  m.def("packed(Tensor weight, Tensor scale) -> Tensor");
  m.def("zeros(int count) -> Tensor", [](int64_t count) {
    return paged({std::max<int64_t>(0, count)}, at::kFloat).zero_();  // pages that nobody wrote to are one page
  });
  m.def("rounding(bool on) -> bool", rounding);
  m.def("has_rounding() -> bool", has_rounding);
  m.def("hash_of(Tensor[] tensors) -> Tensor");
  m.def("product(Tensor x, Tensor weight, Tensor bias, Tensor exact, int outputs) -> Tensor");
  m.def("without_tail(Tensor logits, Tensor tails) -> Tensor");
  m.def(
      "verified(Tensor logits, Tensor q, Tensor x, Tensor k, Tensor temperature, Tensor tails, Tensor u, Tensor next, bool block) "
      "-> Tensor");
  m.def(
      "layers(Tensor x, Tensor beside, Tensor its_norm, Tensor[] weights, Tensor(a!)[] keys, Tensor(b!)[] values, "
      "Tensor cos, Tensor sin, Tensor written, Tensor mask, int read, int low, int heads, int groups, int size, float scale, "
      "float eps, int[] wanted) -> Tensor[]");
  m.def(
      "chain(Tensor ids, Tensor features, Tensor pairs, Tensor only, Tensor embedding, Tensor its_norm, Tensor[] weights, "
      "Tensor(a!)[] keys, Tensor(b!)[] values, Tensor cos, Tensor sin, Tensor head, Tensor exact, Tensor known, Tensor u, "
      "Tensor temperature, Tensor tails, int K, int read, int outputs, int heads, int groups, int size, float scale, float eps) "
      "-> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(inference, CPU, m) {
  m.impl("packed", packed);
  m.impl("hash_of", hash_of);
  m.impl("product", product);
  m.impl("without_tail", without_tail);
  m.impl("verified", verified);
  m.impl("layers", layers);
  m.impl("chain", chain);
}
