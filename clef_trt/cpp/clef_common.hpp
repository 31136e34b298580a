// What both C++ hosts share: errors and tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace clef {

// What went wrong, by who can mend it.
enum class Kind {
    request,        // the request is wrong
    too_long,       // the request needs more tokens than the limit
    bundle,         // the bundle is missing, incomplete, altered or of another version
    engine,         // the engine cannot be opened, refuses its inputs, or its answer is unusable
    setting,        // a setting is unknown or its value impossible
    missing_extra,  // a package is not installed
    python,         // any other exception of Python: a fault of ours; the message has its traceback
    host,           // the host is used in a way it cannot work
};

inline const char* name_of(Kind kind) {
    switch (kind) {
        case Kind::request:
            return "request";
        case Kind::too_long:
            return "too_long";
        case Kind::bundle:
            return "bundle";
        case Kind::engine:
            return "engine";
        case Kind::setting:
            return "setting";
        case Kind::missing_extra:
            return "missing_extra";
        case Kind::python:
            return "python";
        case Kind::host:
            return "host";
    }
    return "unknown";
}

// Base of every exception thrown on purpose; `what()` is UTF-8 and may have several lines.
class Error : public std::runtime_error {
public:
    Error(Kind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
    Kind kind() const noexcept { return kind_; }

private:
    Kind kind_;
};

enum class Type { int64, float32 };

inline const char* name_of(Type type) { return type == Type::int64 ? "int64" : "float32"; }
inline std::size_t size_of(Type type) { return type == Type::int64 ? 8 : 4; }

// A view of a dense tensor, last axis fastest. Whoever made it keeps its memory.
struct Tensor {
    std::string name;
    Type type;
    std::vector<std::int64_t> shape;
    const void* data;

    std::size_t count() const {
        std::size_t result = 1;
        for (auto size : shape) result *= static_cast<std::size_t>(size);
        return result;
    }
    std::size_t bytes() const { return count() * size_of(type); }
};

// The tensor of that name; throws Error(engine) where there is none.
inline const Tensor& find(const std::vector<Tensor>& tensors, const std::string& name) {
    for (const auto& tensor : tensors)
        if (tensor.name == name) return tensor;
    throw Error(Kind::engine, "there is no tensor " + name);
}

// [batch, options] float32; of padding the lowest finite value.
struct Logits {
    std::int64_t batch, options;
    std::vector<float> values;
};

}  // namespace clef
