#pragma once
#include "twin.hpp"

namespace fluctua {
namespace FLUCTUA_ISA {

extern const TwinEngine<float> twin32;
extern const TwinEngine<double> twin64;

}  // namespace FLUCTUA_ISA
}  // namespace fluctua
